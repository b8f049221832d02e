/* Operations on names: LIST, STAT, MKDIR, RENAME, SETATTR. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "init.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif
#define ENTRY_ROOM 4608u             /* an entry with the longest name and target */
#define ENTRIES_FRAME 65536u
#define ENTRIES_TURN 512u
#define NAMES_BUF 16384

struct list_op {
    struct op op;
    int fd;
    uint32_t uid, gid, left;
    long n, at;
    _Alignas(struct dirent_raw) char buf[NAMES_BUF];
};

static void answer(const struct request *q, int err, const char *message) {
    if (err)
        send_error(q->channel, err, CODE_ERRNO, message);
    else
        send_ok(q->channel);
}

/* The next name but . and .., without consuming it; NULL at the end, errno says whether by an error. */
static struct dirent_raw *peek_name(struct list_op *l) {
    for (;;) {
        if (l->at >= l->n) {
            l->at = 0;
            l->n = syscall(SYS_getdents64, l->fd, l->buf, sizeof l->buf);
            if (l->n <= 0) {
                if (l->n == 0)
                    errno = 0;
                return NULL;
            }
        }
        struct dirent_raw *e = (struct dirent_raw *)(void *)(l->buf + l->at);
        if (strcmp(e->name, ".") != 0 && strcmp(e->name, "..") != 0)
            return e;
        l->at += e->reclen;
    }
}

/* False: it vanished meanwhile. A name that may not be examined is listed with the type alone. */
static bool put_named(struct writer *w, int dirfd, const struct dirent_raw *e) {
    char target[PATH_LIMIT + 1] = "";
    struct stat st;
    if (fstatat(dirfd, e->name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            return false;
        memset(&st, 0, sizeof st);
        st.st_mode = (mode_t)e->type << 12; /* DT_ values are S_IFMT values shifted */
        st.st_ino = e->ino;
    }
    if (S_ISLNK(st.st_mode))
        read_link(dirfd, e->name, target);
    put_entry(w, e->name, &st, target);
    return true;
}

/* One frame of entries. True when the directory (or the limit) is at its end. */
static bool fill(struct list_op *l, struct writer *w) {
    uint32_t n = 0;
    bool end = false, truncated = false;
    put_u32(w, 0);
    while (!end && n < ENTRIES_TURN && w->cap - w->len > ENTRY_ROOM) {
        struct dirent_raw *e = peek_name(l);
        if (!e && errno)
            return false;
        end = !e || l->left == 0;
        truncated = e && l->left == 0;
        if (end)
            break;
        if (put_named(w, l->fd, e)) {
            n++;
            l->left--;
        }
        l->at += e->reclen;
    }
    patch_u32(w, 0, n);
    put_u8(w, truncated);
    errno = 0;
    return end;
}

static bool list_pump(struct op *op) {
    struct list_op *l = (struct list_op *)op;
    if (!conn_can_send())
        return false;
    struct writer w = writer_of(sv.scratch, ENTRIES_FRAME);
    if (identity_enter(l->uid, l->gid) != 0) {
        op_fail(op, errno, CODE_ERRNO, "this identity cannot be taken");
        return true;
    }
    bool end = fill(l, &w);
    int err = errno;
    identity_leave();
    if (err) {
        op_fail(op, err, CODE_ERRNO, "the directory cannot be read");
        return true;
    }
    send_frame(K_ENTRIES, end ? FLAG_END : 0, op->channel->id, w.p, w.len);
    if (end)
        op_end(op);
    return true;
}

static void list_release(struct op *op) { close(((struct list_op *)op)->fd); }

static const struct op_type list_type = {.pump = list_pump, .release = list_release};

void dir_list(const struct request *q) {
    char path[PATH_LIMIT + 1];
    path_copy(path, q->path);
    int fd = -1;
    if (identity_enter(q->uid, q->gid) == 0)
        fd = open_path(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0, false);
    identity_leave();
    if (fd < 0) {
        send_error(q->channel, errno, CODE_ERRNO, "the directory cannot be opened");
        return;
    }
    struct list_op *l = (struct list_op *)op_new(sizeof *l, &list_type, q->channel, 0);
    if (!l) {
        close(fd);
        return;
    }
    l->fd = fd;
    l->uid = q->uid;
    l->gid = q->gid;
    l->left = q->number;
}

void path_stat(const struct request *q) {
    char path[PATH_LIMIT + 1], target[PATH_LIMIT + 1] = "";
    struct stat st;
    path_copy(path, q->path);
    int fd = -1;
    if (identity_enter(q->uid, q->gid) == 0)
        fd = open_path(AT_FDCWD, path, O_PATH | (q->bits ? 0 : O_NOFOLLOW), 0, false);
    int err = fd < 0 || fstat(fd, &st) != 0 ? errno : 0;
    if (!err && S_ISLNK(st.st_mode))
        read_link(fd, "", target);
    identity_leave();
    if (fd >= 0)
        close(fd);
    if (err) {
        send_error(q->channel, err, CODE_ERRNO, "stat failed");
        return;
    }
    uint8_t buf[2 * PATH_LIMIT + 128];
    struct writer w = writer_of(buf, sizeof buf);
    put_entry(&w, path, &st, target);
    send_frame(K_ENTRY, 0, q->channel, buf, w.len);
}

/* The group is the asked one even below a setgid directory; the mode is exact. */
static int set_made(int dirfd, const char *name, const struct request *q) {
    int fd = open_path(dirfd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0, true);
    struct stat st;
    if (fd < 0)
        return 0; /* made without the right to read it: nothing more can be done */
    int err = 0;
    if (fstat(fd, &st) == 0 && st.st_gid != q->gid && fchown(fd, (uid_t)-1, q->gid) != 0)
        err = errno;
    if (!err && (st.st_mode & 07777) != q->mode && fchmod(fd, q->mode) != 0)
        err = errno;
    close(fd);
    return err;
}

static int mkdir_one(const char *path, const struct request *q) {
    char name[256];
    int dirfd = open_parent(AT_FDCWD, path, false, name);
    if (dirfd < 0)
        return errno;
    int err = mkdirat(dirfd, name, q->mode) == 0 ? set_made(dirfd, name, q) : errno;
    if (err == EEXIST && q->bits) {
        int fd = open_path(dirfd, name, O_PATH | O_DIRECTORY, 0, false);
        if (fd >= 0) {
            close(fd);
            err = 0;
        }
    }
    close(dirfd);
    return err;
}

void path_mkdir(const struct request *q) {
    char path[PATH_LIMIT + 1];
    path_copy(path, q->path);
    int err = identity_enter(q->uid, q->gid) == 0 ? 0 : errno;
    if (!err && q->bits && make_parents(AT_FDCWD, path, false) != 0)
        err = errno;
    if (!err)
        err = mkdir_one(path, q);
    if (err == EBUSY && q->bits)
        err = 0; /* "/" exists */
    identity_leave();
    answer(q, err, "the directory could not be made");
}

static int rename_between(const struct request *q) {
    char from[PATH_LIMIT + 1], to[PATH_LIMIT + 1], from_name[256], to_name[256];
    path_copy(from, q->path);
    path_copy(to, q->other);
    int a = open_parent(AT_FDCWD, from, false, from_name);
    if (a < 0)
        return errno;
    int b = open_parent(AT_FDCWD, to, false, to_name);
    int err = b < 0 ? errno : 0;
    if (!err && syscall(SYS_renameat2, a, from_name, b, to_name, q->bits ? 0 : RENAME_NOREPLACE) != 0)
        err = errno;
    close(a);
    if (b >= 0)
        close(b);
    return err;
}

void path_rename(const struct request *q) {
    int err = identity_enter(q->uid, q->gid) == 0 ? rename_between(q) : errno;
    identity_leave();
    answer(q, err, "rename failed");
}

/* Owner before mode, because changing the owner clears setuid; time last, because everything changes it. */
static int set_attributes(int fd, const struct request *q) {
    char self[32];
    struct stat st;
    proc_fd_path(self, fd);
    if (fstat(fd, &st) != 0)
        return errno;
    if ((q->bits & ATTR_OWNER) && fchownat(fd, "", q->owner, q->group, AT_EMPTY_PATH) != 0)
        return errno;
    if (q->bits & ATTR_MODE) {
        if (S_ISLNK(st.st_mode))
            return EOPNOTSUPP;
        if (chmod(self, q->mode) != 0)
            return errno;
    }
    struct timespec times[2] = {{0, UTIME_OMIT}, time_of(q->mtime)};
    if ((q->bits & ATTR_MTIME) && utimensat(fd, "", times, AT_EMPTY_PATH) != 0)
        return errno;
    return 0;
}

void path_setattr(const struct request *q) {
    char path[PATH_LIMIT + 1];
    path_copy(path, q->path);
    int fd = -1;
    if (identity_enter(q->uid, q->gid) == 0)
        fd = open_path(AT_FDCWD, path, O_PATH | (q->bits & ATTR_FOLLOW ? 0 : O_NOFOLLOW), 0, false);
    int err = fd < 0 ? errno : set_attributes(fd, q);
    identity_leave();
    if (fd >= 0)
        close(fd);
    answer(q, err, "the attributes could not be set");
}
