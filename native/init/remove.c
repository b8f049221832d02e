/* Removing a tree without recursion, by descriptors only: a symlink swapped in for a directory is removed, not followed.
 * Directories deeper than DEPTH are first moved up to the top, so that no depth exhausts descriptors or stack. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "init.h"

#define DEPTH 48
#define PASSES 1000                  /* how often others may refill a directory before this gives up */

struct level {
    int fd;
    char name[256];                  /* in the level above */
};

static int open_level(int dirfd, const char *name) {
    return openat(dirfd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
}

/* 0 removed (or gone), ENOTEMPTY a directory with content, otherwise the error. */
static int remove_name(int dirfd, const char *name) {
    if (unlinkat(dirfd, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno;
    int err = errno;
    if (unlinkat(dirfd, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return 0;
    if (errno == EEXIST)
        return ENOTEMPTY;
    return errno == ENOTDIR ? err : errno;
}

static int move_up(int from, const char *name, int top) {
    static unsigned long counter;
    char fresh[48];
    for (int i = 0; i < PASSES; i++) {
        snprintf(fresh, sizeof fresh, ".dsec-rm-%d-%lu", (int)getpid(), counter++);
        if (syscall(SYS_renameat2, from, name, top, fresh, 1u /* RENAME_NOREPLACE */) == 0)
            return 0;
        if (errno != EEXIST)
            return errno == ENOENT ? 0 : errno;
    }
    return EEXIST;
}

/* Removes what it can in one directory. 0: all of it; ENOTEMPTY: descend into `into`; otherwise the error. */
static int sweep(int fd, char into[256]) {
    _Alignas(struct dirent_raw) char buf[8192];
    if (lseek(fd, 0, SEEK_SET) < 0)
        return errno;
    for (;;) {
        long n = syscall(SYS_getdents64, fd, buf, sizeof buf);
        if (n <= 0)
            return n == 0 ? 0 : errno;
        for (long at = 0; at < n;) {
            struct dirent_raw *e = (struct dirent_raw *)(void *)(buf + at);
            at += e->reclen;
            if (strcmp(e->name, ".") == 0 || strcmp(e->name, "..") == 0)
                continue;
            int err = remove_name(fd, e->name);
            if (err == 0)
                continue;
            memcpy(into, e->name, strnlen(e->name, 255) + 1);
            into[255] = 0;
            return err;
        }
    }
}

static int push(struct level *l, int *depth, const char *name) {
    if (*depth + 1 == DEPTH)
        return move_up(l[*depth].fd, name, l[0].fd);
    int fd = open_level(l[*depth].fd, name);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : errno; /* swapped: the next sweep sees it */
    ++*depth;
    l[*depth].fd = fd;
    memcpy(l[*depth].name, name, 256);
    return 0;
}

static int descend(struct level *l, int *depth, int parent) {
    char into[256];
    int passes = 0;
    while (*depth >= 0) {
        int err = sweep(l[*depth].fd, into);
        if (err == ENOTEMPTY) {
            err = push(l, depth, into);
            if (err)
                return err;
            continue;
        }
        if (err)
            return err;
        int above = *depth ? l[*depth - 1].fd : parent;
        if (unlinkat(above, l[*depth].name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
            if ((errno != ENOTEMPTY && errno != EEXIST) || ++passes > PASSES)
                return errno;
            continue;
        }
        close(l[*depth].fd);
        --*depth;
    }
    return 0;
}

int remove_tree(int dirfd, const char *name) {
    static struct level levels[DEPTH];
    int err = remove_name(dirfd, name);
    if (err != ENOTEMPTY)
        return err;
    levels[0].fd = open_level(dirfd, name);
    if (levels[0].fd < 0)
        return errno;
    memcpy(levels[0].name, name, strnlen(name, 255) + 1);
    int depth = 0;
    return descend(levels, &depth, dirfd);
}
