/* init: PID 1 of a sandbox. See docs/reference/protocol.md. */
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <malloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <grp.h>
#include <linux/capability.h>

#include "init.h"

#ifndef LANDLOCK_SCOPE_SIGNAL
#define LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET (1ULL << 0)
#define LANDLOCK_SCOPE_SIGNAL (1ULL << 1)
#endif

#define OPENING (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE)
#define LISTENER 3
#define EVENTS 64
#define REAPS_PER_TURN 2048
#define KILL_EVERY 20000000ull       /* ns between two rounds of ending everything */
#define TRIM_AFTER_MS 1000
#define TIMER_SKIPS 16               /* turns that timers wait for a busy connection */

struct server sv;

static volatile sig_atomic_t child_ended, told_to_stop;

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A descriptor that cannot be watched would be forgotten silently; this happens only when the kernel has no memory. */
static void control(int op, int fd, uint32_t events, struct io *io) {
    struct epoll_event ev = {.events = events, .data.ptr = io};
    if (epoll_ctl(sv.epoll, op, fd, &ev) != 0)
        shut_down("init: a descriptor cannot be watched");
}

void io_watch(struct io *io, int fd, uint32_t events) {
    io->fd = fd;
    io->in = io->hup = false;
    io->out = true;
    control(EPOLL_CTL_ADD, fd, EPOLLIN | events, io);
}

void io_want_out(struct io *io, bool want) {
    control(EPOLL_CTL_MOD, io->fd, EPOLLIN | EPOLLRDHUP | EPOLLET | (want ? EPOLLOUT : 0u), io);
}

void io_close(struct io *io) {
    if (io->fd >= 0) {
        /* Explicitly: a child that was just forked may still hold the file, and closing alone would leave the event. */
        epoll_ctl(sv.epoll, EPOLL_CTL_DEL, io->fd, NULL);
        close(io->fd);
    }
    io->fd = -1;
    io->in = io->out = false;
}

int io_leave(struct io *io) {
    int fd = io->fd;
    epoll_ctl(sv.epoll, EPOLL_CTL_DEL, fd, NULL);
    *io = (struct io){.fd = -1};
    return fd;
}

void io_move(struct io *to, struct io *from) {
    *to = (struct io){.fd = from->fd, .in = true};
    control(EPOLL_CTL_MOD, to->fd, EPOLLIN | EPOLLET, to);
    *from = (struct io){.fd = -1};
}

static void say(const char *why) {
    ssize_t ignored = write(2, why, strlen(why));
    ignored = write(2, "\n", 1);
    (void)ignored;
}

/* In a pid namespace the kernel ends everything else when init goes; elsewhere init does it, for at most 5 s. */
void shut_down(const char *why) {
    say(why);
    if (!sv.pidns) {
        if (sv.private_uid)
            kill(-1, SIGKILL);
        tree_kill(now_ns() + 5000000000ull, 0, NULL, NULL);
    }
    _exit(0);
}

static void on_signal(int signo, siginfo_t *info, void *context) {
    (void)context;
    if (signo == SIGCHLD)
        child_ended = 1;
    /* PID 1 obeys only a sender outside its namespace, which the kernel shows as pid 0. */
    if (signo == SIGTERM && (!sv.pidns || info->si_pid == 0))
        told_to_stop = 1;
}

/* Handlers, never SIG_IGN: exec resets a handler to the default, so that commands start with default signals. */
/* Not by the C library, which keeps two or three for itself and refuses them: whoever ignored those would pass it on to
 * every command. All zero is the default action, whatever the kernel's structure looks like. */
static void reset_signals(void) {
    static const unsigned long dfl[8];
    for (int s = 1; s <= 64; s++)
        syscall(SYS_rt_sigaction, s, dfl, NULL, 8);
}

static void set_signals(void) {
    reset_signals();
    struct sigaction act = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    sigfillset(&act.sa_mask);
    const int handled[] = {SIGCHLD, SIGTERM, SIGPIPE, SIGXFSZ, SIGHUP, SIGINT};
    for (size_t i = 0; i < sizeof handled / sizeof *handled; i++)
        sigaction(handled[i], &act, NULL);
    sigset_t block;
    sigemptyset(&block);
    sigaddset(&block, SIGCHLD);
    sigaddset(&block, SIGTERM);
    sigprocmask(SIG_SETMASK, &block, NULL);
}

static bool has_capability(const struct __user_cap_data_struct *d, int cap) {
    return (d[cap / 32].effective >> (cap % 32)) & 1u;
}

static void set_privileges(void) {
    struct __user_cap_header_struct h = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct d[2];
    memset(d, 0, sizeof d);
    sv.uid = geteuid();
    sv.gid = getegid();
    if (syscall(SYS_capget, &h, d) == 0) {
        sv.privileged = has_capability(d, CAP_SETUID) && has_capability(d, CAP_SETGID);
        d[0].inheritable = d[1].inheritable = 0;
        syscall(SYS_capset, &h, d);
    }
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (sv.privileged)
        setgroups(0, NULL);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

static void raise_nofile(void) {
    if (getrlimit(RLIMIT_NOFILE, &sv.nofile) != 0)
        sv.nofile = (struct rlimit){1024, 1024};
    struct rlimit most = {sv.nofile.rlim_max, sv.nofile.rlim_max};
    setrlimit(RLIMIT_NOFILE, &most);
}

/* What may be opened below this path (where it exists) by commands that share their user id with the machine's user. */
static bool may_open(int rules, const char *path) {
    struct landlock_path_beneath_attr rule = {.allowed_access = OPENING, .parent_fd = open(path, O_PATH | O_CLOEXEC)};
    if (rule.parent_fd < 0)
        return errno == ENOENT;
    bool is = syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0;
    close(rule.parent_fd);
    return is;
}

/* Terminals of the machine belong to that user, so commands open none: theirs is given to them open. Everything else stays as it is:
 * these are all places that our own rule set, made by whoever started us, lets anybody open. */
static bool allow_all_but_terminals(int rules) {
    static const char *const open_to_all[] = {
        "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", ".",
        "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
    };
    bool is = true;
    for (size_t i = 0; i < sizeof open_to_all / sizeof *open_to_all; i++)
        is &= may_open(rules, open_to_all[i]);
    return is;
}

static void open_landlock(void) {
    uint64_t attr[3] = {sv.private_uid ? 0 : OPENING, 0, LANDLOCK_SCOPE_SIGNAL | LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET};
    sv.landlock = (int)syscall(SYS_landlock_create_ruleset, attr, sizeof attr, 0);
    if (sv.landlock < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        say("--scope-signals: this kernel cannot scope signals");
        _exit(3);
    }
    if (!sv.private_uid && !allow_all_but_terminals(sv.landlock)) {
        say("--scope-signals: rules for terminals");
        _exit(3);
    }
}

static void usage_error(const char *what) {
    say("init: bad argument:");
    say(what);
    _exit(2);
}

static int parse_oom(const char *s) {
    char *end;
    errno = 0;
    long v = s ? strtol(s, &end, 10) : 0;
    if (!s || errno || *end || end == s || v < -1000 || v > 1000)
        usage_error("--oom needs a number from -1000 to 1000");
    return (int)v;
}

static void parse(char **argv) {
    sv.landlock = -1;
    sv.oom = INT32_MIN;
    for (char **a = argv + 1; *a; a++) {
        if (strcmp(*a, "--pidns") == 0)
            sv.pidns = true;
        else if (strcmp(*a, "--private-uid") == 0)
            sv.private_uid = true;
        else if (strcmp(*a, "--scope-signals") == 0)
            sv.scope_signals = true;
        else if (strcmp(*a, "--id") == 0 && a[1])
            a++; /* for whoever reads our command line: the spawner finds its sandboxes again by it */
        else if (strcmp(*a, "--oom") == 0 && a[1])
            sv.oom = parse_oom(*++a);
        else
            usage_error(*a);
    }
    if (sv.pidns && getpid() != 1)
        usage_error("--pidns, but this is not PID 1");
}

/* glibc keeps what was freed unless told; musl's allocator gives it back by itself. */
#ifdef __GLIBC__
static void tune_heap(void) {
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    mallopt(M_TRIM_THRESHOLD, 64 << 10);
}
static void trim_heap(void) { malloc_trim(0); }
#else
static void tune_heap(void) {}
static void trim_heap(void) {}
#endif

static void set_up(void) {
    tune_heap();
    set_signals();
    set_privileges();
    raise_nofile();
    umask(0);
    if (!sv.pidns)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    sv.scratch = mmap(NULL, SCRATCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int accepts = 0;
    socklen_t size = sizeof accepts;
    if (getsockopt(LISTENER, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0 || !accepts)
        usage_error("descriptor 3 is not a listening socket");
    fcntl(LISTENER, F_SETFD, FD_CLOEXEC);
    fcntl(LISTENER, F_SETFL, O_NONBLOCK);
    if (sv.scope_signals)
        open_landlock();
    sv.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (sv.scratch == MAP_FAILED || sv.epoll < 0)
        _exit(3);
    io_watch(&sv.listener, LISTENER, EPOLLET);
}

static void reap(void) {
    child_ended = 0;
    for (int i = 0; i < REAPS_PER_TURN; i++) {
        int status;
        struct rusage ru;
        pid_t pid = wait4(-1, &status, WNOHANG, &ru);
        if (pid == 0)
            return;
        if (pid < 0) {
            if (errno == ECHILD && sv.killing) {
                sv.killing = false;
                execs_all_dead();
            }
            return;
        }
        spares_reaped(pid);
        execs_reaped(pid, status, &ru);
        workers_reaped(pid, status);
    }
    child_ended = 1;
}

void kill_everything(void) {
    sv.killing = true;
    sv.kill_again = now_ns();
}

static void kill_round(uint64_t now) {
    if (!sv.killing || now < sv.kill_again)
        return;
    if (sv.pidns || sv.private_uid)
        kill(-1, SIGKILL);
    else
        tree_kill_once();
    sv.kill_again = now + KILL_EVERY;
    child_ended = 1;
}

static void trim(void) {
    madvise(sv.scratch, SCRATCH, MADV_DONTNEED);
    conn_trim();
    spares_let_go();
    trim_heap();
    sv.busy = false;
}

static int wait_ms(bool more) {
    if (more || child_ended || told_to_stop)
        return 0;
    uint64_t now = now_ns(), next = execs_next_timer();
    if (sv.killing && sv.kill_again < next)
        next = sv.kill_again;
    uint64_t ms = next <= now ? 0 : (next - now) / 1000000u + 1;
    if (next == NEVER)
        ms = UINT64_MAX;
    if (sv.busy && ms > TRIM_AFTER_MS)
        return TRIM_AFTER_MS;
    return ms == UINT64_MAX ? -1 : ms > 3600000 ? 3600000 : (int)ms;
}

static void wait_events(int ms) {
    struct epoll_event ev[EVENTS];
    sigset_t none;
    sigemptyset(&none);
    int n = epoll_pwait(sv.epoll, ev, EVENTS, ms, &none);
    for (int i = 0; i < n; i++) {
        struct io *io = ev[i].data.ptr;
        io->in |= (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0;
        io->hup |= (ev[i].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0;
        io->out |= (ev[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    }
    if (n == 0 && ms == TRIM_AFTER_MS && sv.busy)
        trim();
}

static bool requests(void) {
    if (sv.listener.in)
        conn_accept();
    return conn_read();
}

/* Requests come before timers: a SHIFT that was sent before this process was thawed counts. The wait may have been
 * interrupted before it could tell of it, so the sockets are asked again whenever a timer is due. A connection that
 * always has more to say delays timers by TIMER_SKIPS turns. */
static bool requests_then_timers(void) {
    static unsigned skipped;
    bool more = requests();
    uint64_t now = now_ns();
    if (execs_next_timer() <= now && !more) {
        sv.listener.in = true;
        conn_io()->in = conn_io()->fd >= 0;
        more = requests();
    }
    execs_monitors();
    if (child_ended)
        reap();
    if (!more || ++skipped > TIMER_SKIPS) {
        execs_timers(now);
        kill_round(now);
        skipped = 0;
    }
    return more;
}

static bool turn(void) {
    bool more = requests_then_timers();
    sv.blocked = false;
    more |= execs_pump();
    more |= ops_pump();
    bool connected = conn_io()->fd >= 0;
    conn_flush();
    execs_release();
    if (connected && (conn_io()->fd < 0 || (sv.blocked && conn_can_send())))
        more = true;
    more |= conn_more();
    if (!more)
        spare_make();
    return more;
}

int main(int argc, char **argv) {
    (void)argc;
    parse(argv);
    set_up();
    bool more = true;
    for (;;) {
        wait_events(wait_ms(more));
        if (told_to_stop)
            shut_down("init: told to stop");
        more = turn();
    }
}
