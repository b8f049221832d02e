/* BATCH: many small creations beneath a root, in order, without following symlinks. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "init.h"

#define OPS_PER_TURN 128
#define KEEP_TIME INT64_MIN

struct batch {
    struct op op;
    int root;
    int dir;                         /* the parent of the op before, or -1 */
    uint32_t uid, gid, done, count;
    struct reader ops;
    char dir_path[PATH_LIMIT + 1];
    uint8_t copy[];
};

/* The parent of `path`, opened beneath the root; the last one is kept, because archives are sorted. */
static int parent(struct batch *b, const char *path, char name[256]) {
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (b->dir >= 0 && slash && slash[1] && strlen(slash + 1) < 256 && strcmp(slash + 1, "..") != 0 &&
        strcmp(slash + 1, ".") != 0 && strncmp(b->dir_path, path, n) == 0 && b->dir_path[n] == 0) {
        strcpy(name, slash + 1);
        return b->dir;
    }
    if (b->dir >= 0)
        close(b->dir);
    b->dir = open_parent(b->root, path, true, name);
    memcpy(b->dir_path, path, n);
    b->dir_path[n] = 0;
    return b->dir;
}

/* Makes way for a file, symlink or hard link: an existing file or symlink goes, anything else stays. */
static int make_way(int dir, const char *name) {
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? 0 : errno;
    if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
        return S_ISDIR(st.st_mode) ? EISDIR : EEXIST;
    return unlinkat(dir, name, 0) == 0 ? 0 : errno;
}

static int set_time(int dir, const char *name, int64_t mtime) {
    if (mtime == KEEP_TIME)
        return 0;
    struct timespec t[2] = {{0, UTIME_OMIT}, time_of(mtime)};
    return utimensat(dir, name, t, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
}

static int finish_file(int fd, const struct batch *b, const struct batch_op *op) {
    struct stat st;
    struct timespec t[2] = {{0, UTIME_OMIT}, time_of(op->mtime)};
    if (fstat(fd, &st) != 0 || (st.st_gid != b->gid && fchown(fd, (uid_t)-1, b->gid) != 0))
        return errno;
    if (fstat(fd, &st) != 0 || ((st.st_mode & 07777) != op->mode && fchmod(fd, op->mode) != 0))
        return errno;
    return op->mtime != KEEP_TIME && futimens(fd, t) != 0 ? errno : 0;
}

static int write_content(int fd, struct span data) {
    while (data.n) {
        ssize_t n = write(fd, data.p, data.n);
        if (n < 0 && errno != EINTR)
            return errno;
        data.p += n > 0 ? n : 0;
        data.n -= n > 0 ? (uint32_t)n : 0;
    }
    return 0;
}

static int make_file(struct batch *b, int dir, const char *name, const struct batch_op *op) {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW;
    int fd = open_path(dir, name, flags, op->mode, true);
    if (fd < 0 && errno == EEXIST) {
        int err = make_way(dir, name);
        if (err)
            return err;
        fd = open_path(dir, name, flags, op->mode, true);
    }
    if (fd < 0)
        return errno;
    int err = write_content(fd, op->data);
    if (!err)
        err = finish_file(fd, b, op);
    close(fd);
    return err;
}

static bool is_directory(int dir, const char *name) {
    struct stat st;
    return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

static int make_directory(struct batch *b, int dir, const char *name, const struct batch_op *op) {
    bool made = mkdirat(dir, name, op->mode) == 0;
    if (!made && errno != EEXIST)
        return errno;
    if (!made && op->mtime == KEEP_TIME && is_directory(dir, name))
        return 0;
    int fd = open_path(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0, true);
    if (fd < 0)
        return errno == ELOOP || errno == ENOTDIR ? EEXIST : made || errno == EACCES ? 0 : errno;
    int err = finish_file(fd, b, op);
    close(fd);
    return made ? err : 0; /* one that existed is kept, whoever owns it */
}

static int make_symlink(int dir, const char *name, const struct batch_op *op) {
    char target[PATH_LIMIT + 1];
    path_copy(target, op->data);
    if (symlinkat(target, dir, name) != 0) {
        int err = errno == EEXIST ? make_way(dir, name) : errno;
        if (err)
            return err;
        if (symlinkat(target, dir, name) != 0)
            return errno;
    }
    return set_time(dir, name, op->mtime);
}

static int make_link(struct batch *b, int dir, const char *name, const struct batch_op *op) {
    char target[PATH_LIMIT + 1], target_name[256];
    path_copy(target, op->data);
    int from = open_parent(b->root, target, true, target_name);
    if (from < 0)
        return errno;
    int err = linkat(from, target_name, dir, name, 0) == 0 ? 0 : errno;
    struct stat old, fresh;
    if (err == EEXIST && fstatat(from, target_name, &old, AT_SYMLINK_NOFOLLOW) == 0 &&
        fstatat(dir, name, &fresh, AT_SYMLINK_NOFOLLOW) == 0) {
        bool same = old.st_ino == fresh.st_ino && old.st_dev == fresh.st_dev; /* removing it could lose the content */
        err = same ? 0 : make_way(dir, name);
        if (!err && !same)
            err = linkat(from, target_name, dir, name, 0) == 0 ? 0 : errno;
    }
    close(from);
    return err;
}

static int apply(struct batch *b, const struct batch_op *op) {
    char path[PATH_LIMIT + 1], name[256];
    path_copy(path, op->path);
    int dir = parent(b, path, name);
    if (dir < 0)
        return errno;
    switch (op->what) {
    case 1: return make_directory(b, dir, name, op);
    case 2: return make_file(b, dir, name, op);
    case 3: return make_symlink(dir, name, op);
    default: return make_link(b, dir, name, op);
    }
}

static void send_done(struct batch *b, int err) {
    uint8_t buf[64];
    struct writer w = writer_of(buf, sizeof buf);
    const char *message = err ? "an operation failed" : "";
    put_u32(&w, b->done);
    put_u32(&w, (uint32_t)err);
    put_bytes(&w, message, strlen(message));
    send_frame(K_BATCH_DONE, 0, b->op.channel->id, buf, w.len);
    op_end(&b->op);
}

static bool batch_pump(struct op *o) {
    struct batch *b = (struct batch *)o;
    struct batch_op op;
    int err = identity_enter(b->uid, b->gid) == 0 ? 0 : errno;
    for (int i = 0; i < OPS_PER_TURN && !err && b->done < b->count; i++) {
        if (!batch_next(&b->ops, &op))
            break;
        err = apply(b, &op);
        if (!err)
            b->done++;
    }
    identity_leave();
    if (err || b->done == b->count)
        send_done(b, err);
    return true;
}

static void batch_release(struct op *o) {
    struct batch *b = (struct batch *)o;
    if (b->root >= 0)
        close(b->root);
    if (b->dir >= 0)
        close(b->dir);
}

static const struct op_type batch_type = {.pump = batch_pump, .release = batch_release};

void batch_start(const struct request *q) {
    struct batch *b = (struct batch *)op_new(sizeof *b + q->ops.size, &batch_type, q->channel, 0);
    if (!b)
        return;
    memcpy(b->copy, q->ops.p, q->ops.size);
    b->ops = reader_of(b->copy, q->ops.size);
    b->count = q->ops.count;
    b->uid = q->uid;
    b->gid = q->gid;
    b->dir = b->root = -1;
    char root[PATH_LIMIT + 1];
    path_copy(root, q->path);
    if (identity_enter(q->uid, q->gid) == 0)
        b->root = open_path(AT_FDCWD, root, O_PATH | O_DIRECTORY, 0, false);
    int err = errno;
    identity_leave();
    if (b->root < 0)
        op_fail(&b->op, err, CODE_ERRNO, "the root cannot be opened");
}
