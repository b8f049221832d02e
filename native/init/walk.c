/* TREE: a directory tree as records. Directories wait as paths relative to the root and are opened beneath it without
 * following symlinks, so depth costs no descriptors and a swapped symlink leads nowhere. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "init.h"

#define OUT_BUF 65536u

enum { TAG_ENTRY = 1, TAG_CONTENT, TAG_FILE_END, TAG_TREE_END };
enum { WHOLE = 0, MAX_BYTES, MAX_ENTRIES };
enum { FILE_WHOLE = 0, FILE_SHORTER, FILE_UNREADABLE };

struct walk {
    int root, out;
    uint64_t bytes, max_bytes;
    uint32_t entries, max_entries;
    char **waiting;
    size_t n, cap;
    size_t used;
    uint8_t buf[OUT_BUF];
};

static int flush(struct walk *w) {
    for (size_t at = 0; at < w->used;) {
        ssize_t n = write(w->out, w->buf + at, w->used - at);
        if (n < 0 && errno != EINTR)
            return errno;
        at += n > 0 ? (size_t)n : 0;
    }
    w->used = 0;
    return 0;
}

/* Room for n bytes (n is far below OUT_BUF). */
static uint8_t *room(struct walk *w, size_t n) {
    if (w->used + n > OUT_BUF && flush(w) != 0)
        return NULL;
    return w->buf + w->used;
}

static int put_short(struct walk *w, uint8_t tag, uint8_t value) {
    uint8_t *p = room(w, 2);
    if (!p)
        return EPIPE;
    p[0] = tag;
    p[1] = value;
    w->used += 2;
    return 0;
}

static int put_tree_entry(struct walk *w, const char *path, const struct stat *st, const char *target) {
    const size_t most = 2 * PATH_LIMIT + 160;
    uint8_t *p = room(w, most);
    if (!p)
        return EPIPE;
    struct writer out = writer_of(p, most);
    put_u8(&out, TAG_ENTRY);
    put_u32(&out, 0);
    put_entry(&out, path, st, target);
    patch_u32(&out, 1, (uint32_t)(out.len - 5));
    w->used += out.len;
    w->entries++;
    return 0;
}

/* The content as long as it was when the file was opened. */
static int put_content(struct walk *w, int fd, uint64_t size) {
    uint64_t at = 0;
    while (at < size) {
        if (OUT_BUF - w->used < 4096 && flush(w) != 0)
            return EPIPE;
        size_t n = OUT_BUF - w->used - 5;
        if (size - at < n)
            n = (size_t)(size - at);
        ssize_t got = pread(fd, w->buf + w->used + 5, n, (off_t)at);
        if (got <= 0)
            return put_short(w, TAG_FILE_END, got == 0 ? FILE_SHORTER : FILE_UNREADABLE);
        struct writer head = writer_of(w->buf + w->used, 5);
        put_u8(&head, TAG_CONTENT);
        put_u32(&head, (uint32_t)got);
        w->used += 5 + (size_t)got;
        at += (uint64_t)got;
        w->bytes += (uint64_t)got;
    }
    return put_short(w, TAG_FILE_END, FILE_WHOLE);
}

/* A regular file: opened first, so that entry and content are of the same one. -1: max_bytes is reached. */
static int put_file(struct walk *w, int dirfd, const char *name, const char *path, struct stat *st) {
    int fd = openat(dirfd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    bool readable = fd >= 0 && fstat(fd, st) == 0 && S_ISREG(st->st_mode);
    if (readable && (uint64_t)st->st_size > w->max_bytes - w->bytes) {
        close(fd);
        return -1;
    }
    int err = put_tree_entry(w, path, st, "");
    if (!err && readable)
        err = put_content(w, fd, (uint64_t)st->st_size);
    else if (!err && S_ISREG(st->st_mode))
        err = put_short(w, TAG_FILE_END, FILE_UNREADABLE);
    if (fd >= 0)
        close(fd);
    return err;
}

static int wait_for(struct walk *w, const char *path) {
    if (w->n == w->cap) {
        size_t cap = w->cap ? w->cap * 2 : 64;
        char **grown = realloc(w->waiting, cap * sizeof *grown);
        if (!grown)
            return ENOMEM;
        w->waiting = grown;
        w->cap = cap;
    }
    char *copy = strdup(path);
    if (!copy)
        return ENOMEM;
    w->waiting[w->n++] = copy;
    return 0;
}

static int join(char out[PATH_LIMIT + 1], const char *dir, const char *name) {
    size_t d = strcmp(dir, ".") == 0 ? 0 : strlen(dir), n = strlen(name);
    if (d + 1 + n > PATH_LIMIT)
        return ENAMETOOLONG;
    memcpy(out, dir, d);
    if (d)
        out[d++] = '/';
    memcpy(out + d, name, n + 1);
    return 0;
}

/* 0, an errno, or -1 - MAX_…: a bound is reached. */
static int visit(struct walk *w, int dirfd, const char *dir, const char *name) {
    char path[PATH_LIMIT + 1], target[PATH_LIMIT + 1] = "";
    struct stat st;
    int err = join(path, dir, name);
    if (err)
        return err;
    if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? 0 : errno;
    if (w->entries >= w->max_entries)
        return -1 - MAX_ENTRIES;
    if (S_ISREG(st.st_mode)) {
        err = put_file(w, dirfd, name, path, &st);
        return err == -1 ? -1 - MAX_BYTES : err;
    }
    if (S_ISLNK(st.st_mode))
        read_link(dirfd, name, target);
    err = put_tree_entry(w, path, &st, target);
    return !err && S_ISDIR(st.st_mode) ? wait_for(w, path) : err;
}

static int visit_all(struct walk *w, int fd, const char *dir) {
    _Alignas(struct dirent_raw) char buf[8192];
    for (;;) {
        long n = syscall(SYS_getdents64, fd, buf, sizeof buf);
        if (n <= 0)
            return n == 0 ? 0 : errno;
        for (long at = 0; at < n;) {
            struct dirent_raw *e = (struct dirent_raw *)(void *)(buf + at);
            at += e->reclen;
            if (strcmp(e->name, ".") == 0 || strcmp(e->name, "..") == 0)
                continue;
            int err = visit(w, fd, dir, e->name);
            if (err)
                return err;
        }
    }
}

/* A directory that may not be read is an error: a tree that looks whole but is not must not exist. */
static int visit_waiting(struct walk *w) {
    char *dir = w->waiting[--w->n];
    int fd = open_path(w->root, dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0, true);
    int err = fd < 0 ? (errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : errno) : visit_all(w, fd, dir);
    if (fd >= 0)
        close(fd);
    free(dir);
    return err;
}

int walk_tree(int root, const struct stat *st, uint64_t max_bytes, uint32_t max_entries, int out) {
    struct walk *w = calloc(1, sizeof *w);
    if (!w)
        return ENOMEM;
    w->root = root;
    w->out = out;
    w->max_bytes = max_bytes;
    w->max_entries = max_entries;
    fcntl(out, F_SETPIPE_SZ, 256 << 10);
    int err = max_entries == 0 ? -1 - MAX_ENTRIES : put_tree_entry(w, ".", st, "");
    if (!err)
        err = wait_for(w, ".");
    while (!err && w->n)
        err = visit_waiting(w);
    if (err > 0)
        return err; /* the process ends: nothing to free */
    err = put_short(w, TAG_TREE_END, (uint8_t)(err ? -1 - err : WHOLE));
    return err ? err : flush(w);
}
