/* The monitor: parent of one command, subreaper of all it forks. It is a fork of init, reports on its control socket
 * and takes orders from it. End of file means that init died, or lets a waiting monitor go. A monitor whose command
 * has left no child behind can take the next one: a command changes only itself, never the monitor. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "init.h"

#define CONTROL 3
#define RULES 4
#define QUIET_NS 2000000l            /* a command that ends sooner is reported once, where that is allowed */
#define KILL_FOR 2000000000ull       /* ns of killing before init is asked to end everything */
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static void report(uint32_t what, pid_t pid, int value, const struct tree_usage *usage) {
    struct report r = {.what = what, .pid = pid, .value = value};
    if (usage)
        r.usage = *usage;
    while (send(CONTROL, &r, sizeof r, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}

static void place_descriptors(int control, const struct plan *first) {
    int rules = sv.landlock;
    if (rules == CONTROL || control <= RULES)
        _exit(127);
    if (first) {
        dup2(first->in, 0);
        dup2(first->out, 1);
        dup2(first->err, 2);
    }
    dup3(control, CONTROL, O_CLOEXEC);
    if (rules >= 0 && rules != RULES)
        dup3(rules, RULES, O_CLOEXEC);
    unsigned rest = rules >= 0 ? RULES + 1 : RULES;
    if (syscall(SYS_close_range, rest, ~0u, 0) != 0)
        for (unsigned fd = rest; fd < 65536; fd++)
            close((int)fd);
}

/* A command can inherit its oom_score_adj from the monitor, which then has it too for as long as it waits in vfork: a file
 * that stays open costs far less than one opened for each command. Only where the monitor may go back to its own value:
 * it may not when that lies below the least that the kernel allows it, and writing it again, unchanged, shows whether it
 * does. Otherwise (fd -1) each command writes its own. */
struct oom {
    int fd;
    char own[16], command[16];
};

static struct oom oom_open(void) {
    struct oom o = {.fd = -1};
    if (sv.oom == INT32_MIN)
        return o;
    snprintf(o.command, sizeof o.command, "%d", sv.oom);
    o.fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    ssize_t n = o.fd < 0 ? -1 : read(o.fd, o.own, sizeof o.own - 1);
    if (n > 0 && pwrite(o.fd, o.own, (size_t)n, 0) == n)
        return o;
    if (o.fd >= 0)
        close(o.fd);
    o.fd = -1;
    return o;
}

static void oom_lend(const struct oom *o, const char *value) {
    ssize_t ignored = o->fd < 0 ? 0 : pwrite(o->fd, value, strlen(value), 0);
    (void)ignored;
}

/* In the command. */
static void oom_set(const struct oom *o) {
    if (o->fd >= 0 || !o->command[0])
        return;
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t ignored = write(fd, o->command, strlen(o->command));
    (void)ignored;
    close(fd);
}

/* System calls, not the C library's functions: those expect threads, and this runs in memory that the monitor shares. */
static bool become(const struct plan *p) {
    if (!sv.privileged)
        return true; /* init refused every other identity before */
    return syscall(SYS_setgroups, p->ngroups, p->groups) == 0 && syscall(SYS_setresgid, p->gid, p->gid, p->gid) == 0 &&
           syscall(SYS_setresuid, p->uid, p->uid, p->uid) == 0;
}

static void limit_files(const struct plan *p) {
    struct rlimit l = sv.nofile;
    if (p->nofile) {
        rlim_t n = p->nofile < l.rlim_max ? p->nofile : l.rlim_max;
        l = (struct rlimit){n, n};
    }
    setrlimit(RLIMIT_NOFILE, &l);
}

/* Tries every directory of PATH; a permission error is remembered, as shells do. Returns errno. */
static int exec_by_path(const struct plan *p, char *buf) {
    int err = ENOENT;
    const char *name = p->argv[0];
    size_t name_n = strlen(name);
    if (name_n == 0 || name_n > 255)
        return name_n ? ENAMETOOLONG : ENOENT;
    for (const char *dir = p->path ? p->path : DEFAULT_PATH; dir; dir = strchr(dir, ':') ? strchr(dir, ':') + 1 : NULL) {
        size_t n = strcspn(dir, ":");
        if (n + name_n + 2 > PATH_LIMIT)
            continue;
        memcpy(buf, dir, n);
        if (n)
            buf[n++] = '/';
        memcpy(buf + n, name, name_n + 1);
        execve(buf, p->argv, p->envp);
        if (errno == EACCES)
            err = EACCES;
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
    }
    return err;
}

/* In the vforked child: memory is shared with the monitor, which waits. Returns the errno of what failed. */
static int become_command(const struct plan *p, const struct oom *oom, char *buf) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    if (p->pty && ioctl(0, TIOCSCTTY, 0) != 0)
        return errno;
    oom_set(oom);
    limit_files(p);
    if (!become(p))
        return errno;
    umask(022);
    if (p->cwd[0] && chdir(p->cwd) != 0)
        return errno;
    if (sv.landlock >= 0 && syscall(SYS_landlock_restrict_self, RULES, 0) != 0)
        return errno;
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (!strchr(p->argv[0], '/'))
        return exec_by_path(p, buf);
    execve(p->argv[0], p->argv, p->envp);
    return errno;
}

static pid_t start(const struct plan *p, const struct oom *oom, int *failed) {
    static char buf[PATH_LIMIT + 1];
    volatile int err = 0;
    pid_t pid = vfork();
    if (pid == 0) {
        err = become_command(p, oom, buf);
        _exit(127);
    }
    *failed = pid < 0 ? errno : err;
    return pid;
}

/* How the last command ended. */
struct ending {
    pid_t leader;                    /* 0 before the first */
    bool ended, childless;
    int status;
    struct tree_usage usage;
};

/* Reaps what has ended, orphans too. Without a child left there is no descendant either, because orphans come back here. */
static void reap(struct ending *e) {
    int status;
    struct rusage ru;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &ru)) > 0) {
        if (pid != e->leader || e->ended)
            continue;
        e->ended = true;
        e->status = status;
        usage_add(&e->usage, &ru);
    }
    e->childless = pid < 0 && errno == ECHILD;
}

static _Noreturn void kill_tree(struct ending *e) {
    pid_t leader = e->ended ? 0 : e->leader;
    if (!tree_kill(now_ns() + KILL_FOR, leader, &e->status, &e->usage)) {
        report(REPORT_ESCALATE, 0, 0, NULL);
        tree_kill(NEVER, leader, &e->status, &e->usage);
    }
    report(REPORT_KILLED, e->leader, e->status, &e->usage);
    _exit(0);
}

/* Signals are given here, where the command's number is its own for as long as it is not reaped. */
static void pass_on(const struct ending *e, const uint8_t order[ORDER_SIZE]) {
    if (!e->ended)
        kill(order[2] ? -e->leader : e->leader, order[1]);
}

/* Until the command has ended and left no child. What it leaves running goes to init, with this process's end. */
static void follow(struct ending *e, bool told) {
    const struct timespec quiet = {0, QUIET_NS};
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    for (bool waited = false;; waited = true) {
        bool had_ended = e->ended;
        reap(e);
        if (e->ended && !had_ended) {
            told = true;
            report(e->childless ? REPORT_DONE : REPORT_ENDED, e->leader, e->status, &e->usage);
            if (e->childless)
                return;
        }
        if (waited && !told) {
            told = true;
            report(REPORT_STARTED, e->leader, 0, NULL);
        }
        struct pollfd control = {.fd = CONTROL, .events = POLLIN};
        if (ppoll(&control, 1, told ? NULL : &quiet, &mask) <= 0)
            continue;
        uint8_t order[ORDER_SIZE] = {0};
        ssize_t n = recv(CONTROL, order, sizeof order, MSG_DONTWAIT);
        if (n == 0 || (n > 0 && order[0] == ORDER_KILL))
            kill_tree(e);
        if (n > 0 && order[0] == ORDER_GO)
            _exit(0);
        if (n > 0 && order[0] == ORDER_SIGNAL)
            pass_on(e, order);
    }
}

static void close_streams(void) {
    close(0);
    close(1);
    close(2);
}

static struct ending run(const struct plan *p, const struct oom *oom) {
    struct ending e = {.status = SIGKILL};
    int failed;
    oom_lend(oom, oom->command);
    e.leader = start(p, oom, &failed);
    oom_lend(oom, oom->own);
    close_streams();
    if (failed) {
        report(REPORT_FAILED, 0, failed, NULL);
        if (e.leader > 0)
            waitpid(e.leader, NULL, 0);
        e.ended = true;
        return e;
    }
    if (!p->late)
        report(REPORT_STARTED, e.leader, 0, NULL);
    follow(&e, !p->late);
    return e;
}

/* Descriptors 0, 1 and 2 were free, so that is what the three became. */
static bool placed(struct msghdr *m) {
    const int wanted[3] = {0, 1, 2};
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    return !(m->msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && c && c->cmsg_type == SCM_RIGHTS &&
           c->cmsg_len == CMSG_LEN(sizeof wanted) && memcmp(CMSG_DATA(c), wanted, sizeof wanted) == 0;
}

/* The next message that is not a signal for a command that has ended. */
static ssize_t next_order(struct msghdr *m) {
    size_t room = m->msg_controllen;
    ssize_t n;
    do {
        m->msg_controllen = room;
        n = recvmsg(CONTROL, m, 0);
    } while ((n < 0 && errno == EINTR) || (n > 0 && sv.scratch[0] == ORDER_SIGNAL));
    return n;
}

/* Waits for the next command. A kill is for the last one, whose end init has not read yet; anything else ends this process. */
static struct plan *next_plan(struct ending *last) {
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(3 * sizeof(int))];
    } c;
    struct iovec v = {sv.scratch, PLAN_MESSAGE + 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof c};
    ssize_t n = next_order(&m);
    if (n == 1 && sv.scratch[0] == ORDER_KILL)
        kill_tree(last);
    if (n < 2 || sv.scratch[0] != ORDER_RUN || !placed(&m))
        _exit(0);
    struct frame f = {.kind = K_EXEC, .payload = {sv.scratch + 1, (uint32_t)(n - 1)}};
    struct request q;
    struct plan *p = request_decode(&f, &q) == REQUEST_OK ? plan_new(&q) : NULL;
    if (!p) {
        report(REPORT_FAILED, 0, ENOMEM, NULL);
        _exit(0);
    }
    if (n > 4096)
        madvise(sv.scratch, SCRATCH, MADV_DONTNEED);
    return p;
}

_Noreturn void monitor_run(int control, struct plan *first) {
    struct ending last = {.ended = true};
    place_descriptors(control, first);
    struct oom oom = oom_open();
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_NAME, "monitor", 0, 0, 0);
    if (!first)
        close_streams();
    for (struct plan *p = first ? first : next_plan(&last);; p = next_plan(&last)) {
        last = run(p, &oom);
        free(p);
    }
}
