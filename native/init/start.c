/* From an EXEC request to a monitor that runs the command. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "exec.h"

struct ends {
    int in[2], out[2], err[2], control[2];
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
static struct plan *plan_new(const struct request *q) {
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
    return p;
}

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
    *d = (struct ends){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, d->control) != 0)
        return errno;
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
    close_pair(d->control);
}

static void aim(struct plan *p, const struct ends *d) {
    p->control = d->control[1];
    p->in = p->pty ? d->out[1] : d->in[0] >= 0 ? d->in[0] : 0;
    p->out = d->out[1];
    p->err = p->pty ? d->out[1] : d->err[1];
}

static void watch(struct io *io, int fd, uint32_t events) {
    fcntl(fd, F_SETFL, O_NONBLOCK); /* the access mode cannot be changed and need not be given */
    io_watch(io, fd, events | EPOLLET);
}

/* Keeps init's ends and closes the command's. */
static void keep_ends(struct exec *e, struct ends *d) {
    io_watch(&e->control, d->control[0], 0);
    close(d->control[1]);
    watch(&e->s[0].io, d->out[0], e->pty ? EPOLLOUT : 0);
    close(d->out[1]);
    if (d->err[0] >= 0) {
        watch(&e->s[1].io, d->err[0], 0);
        close(d->err[1]);
    }
    if (d->in[1] >= 0) {
        watch(&e->in.io, d->in[1], EPOLLOUT);
        close(d->in[0]);
    }
}

int exec_launch(struct exec *e, const struct request *q) {
    struct ends d;
    struct plan *p = plan_new(q);
    int err = p ? open_ends(&d, q) : ENOMEM;
    if (!p)
        return err;
    if (err == 0) {
        aim(p, &d);
        e->monitor = fork();
        if (e->monitor == 0)
            monitor_run(p);
        err = e->monitor < 0 ? errno : 0;
    }
    if (err)
        close_ends(&d);
    else
        keep_ends(e, &d);
    free(p);
    return err;
}
