/* From an EXEC request to a monitor that runs the command. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "exec.h"

#define WRITERS_LIMIT 64u

struct ends {
    int in[2], out[2], err[2];
};

static void copy_strings(struct list l, char **to, char **text) {
    struct reader r = reader_of(l.p, l.size);
    for (uint32_t i = 0; i < l.count; i++) {
        struct span s = get_bytes(&r);
        memcpy(*text, s.p, s.n);
        (*text)[s.n] = 0;
        to[i] = *text;
        *text += s.n + 1;
    }
    to[l.count] = NULL;
}

/* One allocation: the plan, the pointer tables, the text. */
struct plan *plan_new(const struct request *q) {
    size_t pointers = ((size_t)q->argv.count + q->env.count + 2) * sizeof(char *);
    size_t text = q->argv.size + q->env.size;  /* each item gives up a 4-byte length for a NUL */
    struct plan *p = malloc(sizeof *p + pointers + text + 2);
    if (!p)
        return NULL;
    p->argv = (char **)(void *)(p + 1);
    p->envp = p->argv + q->argv.count + 1;
    char *at = (char *)(p->envp + q->env.count + 1);
    copy_strings(q->argv, p->argv, &at);
    copy_strings(q->env, p->envp, &at);
    p->path = NULL;
    for (char **v = p->envp; *v; v++)
        if (strncmp(*v, "PATH=", 5) == 0)
            p->path = *v + 5;
    path_copy(p->cwd, q->other);
    p->uid = q->uid;
    p->gid = q->gid;
    p->ngroups = q->groups.count;
    struct reader r = reader_of(q->groups.p, q->groups.size);
    for (uint32_t i = 0; i < p->ngroups; i++)
        p->groups[i] = get_u32(&r);
    p->nofile = q->nofile;
    p->pty = q->bits & EXEC_PTY;
    p->late = exec_late(q);
    return p;
}

/* Whoever sends input waits for STARTED. */
bool exec_late(const struct request *q) { return (q->bits & (EXEC_LATE | EXEC_PTY | EXEC_STDIN)) == EXEC_LATE; }

static void close_pair(int p[2]) {
    for (int i = 0; i < 2; i++)
        if (p[i] > 3)
            close(p[i]);
}

static int open_terminal(struct ends *d, const struct request *q) {
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        return errno;
    d->out[0] = master;
    int unlock = 0;
    struct winsize size = {.ws_row = q->rows, .ws_col = q->cols};
    if (ioctl(master, TIOCSPTLCK, &unlock) != 0 || ioctl(master, TIOCSWINSZ, &size) != 0)
        return errno;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0)
        return errno;
    d->out[1] = slave;
    if (fchown(slave, q->uid, (gid_t)-1) != 0 && errno != EPERM)
        return errno;
    return 0;
}

static int open_ends(struct ends *d, const struct request *q) {
    *d = (struct ends){{-1, -1}, {-1, -1}, {-1, -1}};
    if (q->bits & EXEC_PTY)
        return open_terminal(d, q);
    if (pipe2(d->out, O_CLOEXEC) != 0 || pipe2(d->err, O_CLOEXEC) != 0)
        return errno;
    if ((q->bits & EXEC_STDIN) && pipe2(d->in, O_CLOEXEC) != 0)
        return errno;
    return 0;
}

static void close_ends(struct ends *d) {
    close_pair(d->in);
    close_pair(d->out);
    close_pair(d->err);
}

static void watch(struct io *io, int fd, uint32_t events) {
    fcntl(fd, F_SETFL, O_NONBLOCK); /* the access mode cannot be changed and need not be given */
    io_watch(io, fd, events | EPOLLET);
}

/* A terminal must not look open when it is not; and where many run, descriptors are worth more than a wake-up. */
static void keep_writer(struct stream *s, int fd, bool pty) {
    if (pty || execs_running() >= WRITERS_LIMIT)
        close(fd);
    else
        s->writer = fd;
}

/* Keeps init's ends and closes the command's. */
static void keep_ends(struct exec *e, struct ends *d) {
    io_watch(&e->control, e->monitor.control, 0);
    watch(&e->s[0].io, d->out[0], e->pty ? EPOLLOUT : 0);
    keep_writer(&e->s[0], d->out[1], e->pty);
    if (d->err[0] >= 0) {
        watch(&e->s[1].io, d->err[0], 0);
        keep_writer(&e->s[1], d->err[1], false);
    }
    if (d->in[1] >= 0) {
        watch(&e->in.io, d->in[1], EPOLLOUT);
        close(d->in[0]);
    }
}

int monitor_fork(struct plan *first, struct monitor *m) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return errno;
    *m = (struct monitor){.control = ends[0], .pid = fork()};
    if (m->pid == 0)
        monitor_run(ends[1], first);
    int err = m->pid < 0 ? errno : 0;
    close(ends[1]);
    if (err)
        close(ends[0]);
    return err;
}

/* The descriptors of the command. Without standard input it reads init's own, which is /dev/null. */
static void aim(int fds[3], const struct ends *d, bool pty) {
    fds[0] = pty ? d->out[1] : d->in[0] >= 0 ? d->in[0] : 0;
    fds[1] = d->out[1];
    fds[2] = pty ? d->out[1] : d->err[1];
}

static bool hand_over(int control, const struct request *q, const int fds[3]) {
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(3 * sizeof(int))];
    } c;
    char order = ORDER_RUN;
    struct iovec v[2] = {{&order, 1}, {(void *)q->payload.p, q->payload.n}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2, .msg_control = &c, .msg_controllen = sizeof c};
    memset(&c, 0, sizeof c);
    c.head.cmsg_level = SOL_SOCKET;
    c.head.cmsg_type = SCM_RIGHTS;
    c.head.cmsg_len = CMSG_LEN(3 * sizeof(int));
    memcpy(CMSG_DATA(&c.head), fds, 3 * sizeof(int));
    return sendmsg(control, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)(1 + q->payload.n);
}

/* To a monitor that waits. False: there is none that takes it. */
static bool to_spare(struct exec *e, const struct request *q, const int fds[3]) {
    while (q->payload.n <= PLAN_MESSAGE && spare_take(&e->monitor)) {
        kill(e->monitor.pid, SIGCONT); /* the sandbox's root may have stopped it while it waited */
        if (hand_over(e->monitor.control, q, fds))
            return true;
        close(e->monitor.control); /* it was killed, or the kernel refuses to carry descriptors: it goes */
    }
    return false;
}

/* To a monitor that is forked for it and inherits the plan and the descriptors. */
static int to_new(struct exec *e, const struct request *q, const int fds[3]) {
    struct plan *p = plan_new(q);
    if (!p)
        return ENOMEM;
    p->in = fds[0];
    p->out = fds[1];
    p->err = fds[2];
    int err = monitor_fork(p, &e->monitor);
    free(p);
    return err;
}

int exec_launch(struct exec *e, const struct request *q) {
    struct ends d;
    int fds[3];
    int err = open_ends(&d, q);
    if (err == 0) {
        aim(fds, &d, e->pty);
        err = to_spare(e, q, fds) ? 0 : to_new(e, q, fds);
    }
    if (err)
        close_ends(&d);
    else
        keep_ends(e, &d);
    return err;
}
