/* Operations that may take long run in a forked worker with the user's full identity. Its content (if any) comes through
 * a pipe and is forwarded against credit; its result is its exit status: 0, or an errno. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "init.h"

#define WORKER_OUT 3
#define WORKERS_LIMIT 64u

struct worker_op {
    struct op op;
    struct io pipe;
    pid_t pid;
    bool content, reaped;
    int status;
};

typedef int (*job)(const struct request *q);

static uint32_t workers;

static void finish(struct worker_op *w) {
    uint32_t channel = w->op.channel->id;
    int err = WIFEXITED(w->status) ? WEXITSTATUS(w->status) : ECANCELED;
    if (err)
        send_error(channel, err, CODE_ERRNO, WIFEXITED(w->status) ? "the operation failed" : "the worker was killed");
    else if (w->content)
        send_data(channel, FLAG_END, NULL, NULL, 0);
    else
        send_ok(channel);
    op_end(&w->op);
}

static bool worker_pump(struct op *op) {
    struct worker_op *w = (struct worker_op *)op;
    struct channel *c = op->channel;
    if (w->pipe.fd < 0 && w->reaped) {
        finish(w);
        return true;
    }
    size_t n = c->credit < FRAME_MAX ? (size_t)c->credit : FRAME_MAX;
    if (!w->content)
        n = 1;
    if (!w->pipe.in || n == 0 || !conn_can_send())
        return false;
    ssize_t got = read(w->pipe.fd, sv.scratch, n);
    if (got > 0 && w->content) {
        send_data(c->id, 0, NULL, sv.scratch, (size_t)got);
        c->credit -= (uint64_t)got;
    } else if (got < 0 && errno == EAGAIN) {
        w->pipe.in = false;
    } else if (got == 0 || (got < 0 && errno != EINTR)) {
        io_close(&w->pipe);
    }
    return got != -1;
}

static void worker_cancel(struct op *op) {
    struct worker_op *w = (struct worker_op *)op;
    if (!w->reaped)
        kill(w->pid, SIGKILL); /* not reaped: the pid is still its own */
}

static void worker_release(struct op *op) {
    struct worker_op *w = (struct worker_op *)op;
    io_close(&w->pipe);
    workers--;
}

static const struct op_type worker_type = {.pump = worker_pump, .cancel = worker_cancel, .release = worker_release};

void workers_reaped(pid_t pid, int status) {
    for (struct op *op = sv.ops; op; op = op->next) {
        struct worker_op *w = (struct worker_op *)op;
        if (op->type == &worker_type && w->pid == pid && !w->reaped) {
            w->reaped = true;
            w->status = status;
            w->pipe.in = w->pipe.fd >= 0;
            return;
        }
    }
}

static _Noreturn void work(const struct request *q, job run, int out) {
    dup3(out, WORKER_OUT, O_CLOEXEC);
    if (syscall(SYS_close_range, WORKER_OUT + 1, ~0u, 0) != 0)
        for (int fd = WORKER_OUT + 1; fd < 65536; fd++)
            close(fd);
    prctl(PR_SET_NAME, "worker", 0, 0, 0);
    if (identity_become(q->uid, q->gid) != 0)
        _exit(errno);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    int err = run(q);
    _exit(err > 0 && err < 256 ? err : err ? EIO : 0);
}

static void worker_start(const struct request *q, job run, bool content) {
    int ends[2];
    if (workers >= WORKERS_LIMIT || sv.killing) {
        send_error(q->channel, EAGAIN, CODE_BOUND, "64 long operations are running");
        return;
    }
    if (pipe2(ends, O_CLOEXEC) != 0) {
        send_error(q->channel, errno, CODE_ERRNO, "no pipe for a worker");
        return;
    }
    struct worker_op *w = (struct worker_op *)op_new(sizeof *w, &worker_type, q->channel, q->credit);
    if (!w) {
        close(ends[0]);
        close(ends[1]);
        return;
    }
    workers++;
    w->content = content;
    w->pid = fork();
    if (w->pid == 0)
        work(q, run, ends[1]);
    int err = errno;
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    io_watch(&w->pipe, ends[0], EPOLLET);
    if (w->pid < 0) {
        w->reaped = true;
        op_fail(&w->op, err, CODE_ERRNO, "no worker could be forked");
    }
}

static int do_remove(const struct request *q) {
    char path[PATH_LIMIT + 1], name[256];
    path_copy(path, q->path);
    int dirfd = open_parent(AT_FDCWD, path, false, name);
    return dirfd < 0 ? errno : remove_tree(dirfd, name);
}

static int remove_one(int dirfd, const char *name, bool recursive, bool *long_work) {
    struct stat st;
    if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    if (!S_ISDIR(st.st_mode))
        return unlinkat(dirfd, name, 0) == 0 ? 0 : errno;
    if (unlinkat(dirfd, name, AT_REMOVEDIR) == 0)
        return 0;
    *long_work = recursive && (errno == ENOTEMPTY || errno == EEXIST);
    return errno;
}

void path_remove(const struct request *q) {
    char path[PATH_LIMIT + 1], name[256];
    bool long_work = false;
    path_copy(path, q->path);
    int dirfd = -1, err = 0;
    if (identity_enter(q->uid, q->gid) == 0)
        dirfd = open_parent(AT_FDCWD, path, false, name);
    err = dirfd < 0 ? errno : remove_one(dirfd, name, q->bits, &long_work);
    identity_leave();
    if (dirfd >= 0)
        close(dirfd);
    if (long_work)
        worker_start(q, do_remove, false);
    else if (err)
        send_error(q->channel, err, CODE_ERRNO, "it could not be removed");
    else
        send_ok(q->channel);
}

static int do_tree(const struct request *q) {
    char path[PATH_LIMIT + 1];
    struct stat st;
    path_copy(path, q->path);
    int root = open_path(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0, false);
    if (root < 0 || fstat(root, &st) != 0)
        return errno;
    return walk_tree(root, &st, q->a, q->number, WORKER_OUT);
}

void tree_start(const struct request *q) { worker_start(q, do_tree, true); }

static int do_read(const struct request *q) {
    static char buf[65536];
    char path[PATH_LIMIT + 1];
    struct stat st;
    path_copy(path, q->path);
    int fd = open_path(AT_FDCWD, path, O_RDONLY, 0, false);
    if (fd < 0 || fstat(fd, &st) != 0)
        return errno;
    if (!S_ISREG(st.st_mode))
        return ENXIO;
    uint64_t at = q->a, end = q->b > UINT64_MAX - at ? UINT64_MAX : at + q->b;
    while (at < end && at <= INT64_MAX) {
        size_t n = end - at < sizeof buf ? (size_t)(end - at) : sizeof buf;
        ssize_t got = pread(fd, buf, n, (off_t)at);
        if (got < 0)
            return errno;
        if (got == 0)
            break;
        for (ssize_t sent = 0, w; sent < got; sent += w)
            if ((w = write(WORKER_OUT, buf + sent, (size_t)(got - sent))) < 0)
                return errno;
        at += (uint64_t)got;
    }
    return 0;
}

void worker_read(const struct request *q) { worker_start(q, do_read, true); }
