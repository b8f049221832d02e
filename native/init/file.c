/* READ and WRITE: file content over a channel. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "init.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif
#define NEW_NAME_TRIES 8

struct read_op {
    struct op op;
    int fd;
    uint64_t at, left;
};

struct write_op {
    struct op op;
    int fd, dirfd;                   /* dirfd: atomic only */
    uint32_t uid, gid, mode, bits;
    bool created;
    char name[256], temporary[32];
    char path[];
};

static void type_error(uint32_t channel, mode_t mode) {
    bool dir = S_ISDIR(mode);
    send_error(channel, dir ? EISDIR : ENXIO, CODE_TYPE, dir ? "it is a directory" : "it is not a regular file");
}

static bool on_proc(int fd) {
    struct statfs s;
    return fstatfs(fd, &s) == 0 && s.f_type == PROC_SUPER_MAGIC;
}

static void send_entry(uint32_t channel, const char *path, const struct stat *st) {
    uint8_t buf[PATH_LIMIT + 128];
    struct writer w = writer_of(buf, sizeof buf);
    put_entry(&w, path, st, "");
    send_frame(K_ENTRY, 0, channel, buf, w.len);
}

/* Opens for reading or writing without ever blocking; -1 after an ERROR was sent. */
static int open_regular(uint32_t channel, int base, const char *path, int flags, mode_t mode, bool beneath,
                        struct stat *st) {
    int fd = open_path(base, path, flags, mode, beneath);
    if (fd < 0) {
        int err = errno;
        bool type = err == ENXIO || err == EISDIR;
        send_error(channel, err, type ? CODE_TYPE : CODE_ERRNO, type ? "it is not a regular file" : "open failed");
        return -1;
    }
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode))
        return fd;
    type_error(channel, st->st_mode);
    close(fd);
    return -1;
}

static bool read_pump(struct op *op) {
    struct read_op *r = (struct read_op *)op;
    struct channel *c = op->channel;
    if (!conn_can_send())
        return false;
    size_t n = r->left < FRAME_MAX ? (size_t)r->left : FRAME_MAX;
    if (c->credit < n)
        n = (size_t)c->credit;
    if (n == 0 && r->left)
        return false;
    ssize_t got = n ? pread(r->fd, sv.scratch, n, (off_t)r->at) : 0;
    if (got < 0) {
        if (errno != EINTR)
            op_fail(op, errno, CODE_ERRNO, "read failed");
        return true;
    }
    r->at += (uint64_t)got;
    r->left -= (uint64_t)got;
    c->credit -= (uint64_t)got;
    bool end = got == 0 || r->left == 0;
    send_data(c->id, end ? FLAG_END : 0, NULL, sv.scratch, (size_t)got);
    if (end)
        op_end(op);
    return true;
}

static void read_release(struct op *op) { close(((struct read_op *)op)->fd); }

static const struct op_type read_type = {.pump = read_pump, .release = read_release};

/* Content that the kernel makes up has no size; reading it could touch init itself, or take long: a worker does it. */
static void read_made_up(const struct request *q, const char *path, const struct stat *st) {
    send_entry(q->channel, path, st);
    worker_read(q);
}

void file_read(const struct request *q) {
    char path[PATH_LIMIT + 1];
    struct stat st;
    path_copy(path, q->path);
    if (identity_enter(q->uid, q->gid) != 0) {
        send_error(q->channel, errno, CODE_ERRNO, "this identity cannot be taken");
        return;
    }
    int fd = open_regular(q->channel, AT_FDCWD, path, O_RDONLY, 0, false, &st);
    identity_leave();
    if (fd < 0)
        return;
    if (on_proc(fd)) {
        close(fd);
        read_made_up(q, path, &st);
        return;
    }
    struct read_op *r = (struct read_op *)op_new(sizeof *r, &read_type, q->channel, q->credit);
    if (!r) {
        close(fd);
        return;
    }
    uint64_t size = (uint64_t)st.st_size, rest = q->a < size ? size - q->a : 0;
    r->fd = fd;
    r->at = q->a;
    r->left = q->b < rest ? q->b : rest;
    send_entry(q->channel, path, &st);
}

static bool atomic(const struct write_op *w) { return w->bits & WRITE_ATOMIC; }

static void discard(struct write_op *w) {
    if (w->fd < 0 || !atomic(w))
        return;
    if (identity_enter(w->uid, w->gid) == 0)
        unlinkat(w->dirfd, w->temporary, 0);
    identity_leave();
}

static void write_cancel(struct op *op) { discard((struct write_op *)op); }

static void write_release(struct op *op) {
    struct write_op *w = (struct write_op *)op;
    if (w->fd >= 0)
        close(w->fd);
    if (w->dirfd >= 0)
        close(w->dirfd);
}

static void write_fail(struct write_op *w, int err, const char *message) {
    discard(w);
    op_fail(&w->op, err, CODE_ERRNO, message);
}

static int write_all(int fd, struct span data) {
    while (data.n) {
        ssize_t n = write(fd, data.p, data.n);
        if (n < 0 && errno != EINTR)
            return errno;
        if (n > 0) {
            data.p += n;
            data.n -= (uint32_t)n;
        }
    }
    return 0;
}

static int own_group(const struct write_op *w, const struct stat *st) {
    return st->st_gid == w->gid ? 0 : fchown(w->fd, (uid_t)-1, w->gid); /* a setgid directory gave another */
}

/* Mode last: writing and changing the owner clear setuid. */
static int write_finish(struct write_op *w, struct stat *st) {
    if (fstat(w->fd, st) != 0)
        return errno;
    if (w->created && (own_group(w, st) != 0 || fchmod(w->fd, w->mode) != 0))
        return errno;
    unsigned no_replace = w->bits & WRITE_EXCLUSIVE ? RENAME_NOREPLACE : 0;
    if (atomic(w) && syscall(SYS_renameat2, w->dirfd, w->temporary, w->dirfd, w->name, no_replace) != 0)
        return errno;
    return fstat(w->fd, st) != 0 ? errno : 0;
}

static void write_data(struct op *op, struct span data, bool end) {
    struct write_op *w = (struct write_op *)op;
    if (data.n && !end) { /* before the write: the engine sends the next piece meanwhile */
        uint8_t buf[4];
        struct writer credit = writer_of(buf, sizeof buf);
        put_u32(&credit, data.n);
        send_frame(K_CREDIT, 0, op->channel->id, buf, sizeof buf);
        conn_push();
        op->channel->window += data.n;
    }
    int err = identity_enter(w->uid, w->gid) == 0 ? write_all(w->fd, data) : errno;
    struct stat st;
    bool whole = end && err == 0;
    if (whole)
        err = write_finish(w, &st);
    identity_leave();
    if (err) {
        write_fail(w, err, whole ? "the file could not be finished" : "write failed");
    } else if (end) {
        send_entry(op->channel->id, w->path, &st);
        op_end(op);
    }
}

static const struct op_type write_type = {.data = write_data, .cancel = write_cancel, .release = write_release};

/* A plain write opens the file itself. */
static void open_plain(struct write_op *w, const struct request *q, int base, struct stat *st) {
    bool beneath = q->other.n != 0;
    int flags = O_WRONLY | (w->bits & WRITE_APPEND ? O_APPEND : 0);
    if (!(w->bits & WRITE_EXCLUSIVE)) {
        int fd = open_path(base, w->path, flags, 0, beneath);
        if (fd >= 0 || errno != ENOENT || !(w->bits & WRITE_CREATE)) {
            if (fd >= 0)
                close(fd);
            w->fd = open_regular(q->channel, base, w->path, flags, 0, beneath, st);
            return;
        }
    }
    int fd = open_path(base, w->path, flags | O_CREAT | O_EXCL, w->mode, beneath);
    if (fd >= 0) {
        w->created = true;
        w->fd = fd;
        fstat(fd, st);
    } else if (errno == EEXIST && !(w->bits & WRITE_EXCLUSIVE)) { /* a dangling symlink, or somebody was faster */
        w->fd = open_regular(q->channel, base, w->path, flags | O_CREAT, w->mode, beneath, st);
    } else {
        send_error(q->channel, errno, CODE_ERRNO, "the file could not be made");
    }
}

/* What stands in the way of an atomic write. 0: nothing. */
static int check_target(const struct write_op *w, mode_t *mode) {
    struct stat st;
    *mode = S_IFREG;
    if (fstatat(w->dirfd, w->name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT && (w->bits & (WRITE_CREATE | WRITE_EXCLUSIVE)))
            return 0;
        return errno;
    }
    if (w->bits & WRITE_EXCLUSIVE)
        return EEXIST;
    if (!S_ISLNK(st.st_mode))
        *mode = st.st_mode;
    return S_ISREG(*mode) ? 0 : ENXIO;
}

static int open_temporary(struct write_op *w) {
    for (int i = 0; i < NEW_NAME_TRIES; i++) {
        uint64_t r = now_ns();
        if (getrandom(&r, sizeof r, GRND_NONBLOCK) < 0)
            r += (uint64_t)i;
        snprintf(w->temporary, sizeof w->temporary, ".dsec-%016llx", (unsigned long long)r);
        int fd = open_path(w->dirfd, w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600, true);
        if (fd >= 0 || errno != EEXIST)
            return fd;
    }
    return -1;
}

static void open_atomic(struct write_op *w, const struct request *q, int base) {
    mode_t mode;
    w->dirfd = open_parent(base, w->path, q->other.n != 0, w->name);
    int err = w->dirfd < 0 ? errno : check_target(w, &mode);
    if (err == ENXIO && w->dirfd >= 0) {
        type_error(q->channel, mode);
        return;
    }
    if (err == 0 && (w->fd = open_temporary(w)) < 0)
        err = errno;
    if (err)
        send_error(q->channel, err, CODE_ERRNO, "the file could not be made");
    w->created = w->fd >= 0;
}

/* Opens what the request names, as its user. fd stays -1 after an ERROR. */
static void write_open(struct write_op *w, const struct request *q, struct stat *st) {
    char root[PATH_LIMIT + 1];
    bool beneath = q->other.n != 0;
    path_copy(root, q->other);
    int base = beneath ? open_path(AT_FDCWD, root, O_PATH | O_DIRECTORY, 0, false) : AT_FDCWD;
    if (beneath && base < 0) {
        send_error(q->channel, errno, CODE_ERRNO, "the root cannot be opened");
        return;
    }
    if ((w->bits & WRITE_PARENTS) && make_parents(base, w->path, beneath) != 0)
        send_error(q->channel, errno, CODE_ERRNO, "the parent directories could not be made");
    else if (atomic(w))
        open_atomic(w, q, base);
    else
        open_plain(w, q, base, st);
    if (beneath)
        close(base);
}

static bool write_begin(struct write_op *w, const struct request *q) {
    struct stat st = {0};
    if (identity_enter(w->uid, w->gid) != 0) {
        send_error(q->channel, errno, CODE_ERRNO, "this identity cannot be taken");
        return false;
    }
    write_open(w, q, &st);
    if (w->fd >= 0 && on_proc(w->fd)) {
        type_error(q->channel, 0);
        close(w->fd);
        w->fd = -1;
    }
    bool truncate = !w->created && !(w->bits & WRITE_APPEND);
    if (w->fd >= 0 && truncate && ftruncate(w->fd, 0) != 0) {
        send_error(q->channel, errno, CODE_ERRNO, "the file could not be emptied");
        close(w->fd);
        w->fd = -1;
    }
    identity_leave();
    return w->fd >= 0;
}

void file_write(const struct request *q) {
    struct write_op *w = (struct write_op *)op_new(sizeof *w + q->path.n + 1, &write_type, q->channel, 0);
    if (!w)
        return;
    memcpy(w->path, q->path.p, q->path.n);
    w->fd = w->dirfd = -1;
    w->uid = q->uid;
    w->gid = q->gid;
    w->mode = q->mode;
    w->bits = q->bits;
    if (write_begin(w, q))
        send_ok(q->channel);
    else
        op_end(&w->op);
}
