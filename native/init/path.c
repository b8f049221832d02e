/* The file-system identity of an operation, and path resolution that never leaves what it was given.
 *
 * Magic links of /proc are never followed: in init's context they would name init's own descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "init.h"

int identity_enter(uint32_t uid, uint32_t gid) {
    if (uid == sv.uid && gid == sv.gid)
        return 0;
    if (!sv.privileged) {
        errno = EPERM;
        return -1;
    }
    setfsgid(gid);
    setfsuid(uid);
    /* An id that is not mapped is ignored silently; asking for an impossible one tells what is set. */
    if ((uint32_t)setfsgid((gid_t)-1) == gid && (uint32_t)setfsuid((uid_t)-1) == uid)
        return 0;
    identity_leave();
    errno = EPERM;
    return -1;
}

void identity_leave(void) {
    int keep = errno;
    if (sv.privileged) {
        setfsuid(sv.uid);
        setfsgid(sv.gid);
    }
    errno = keep;
}

int identity_become(uint32_t uid, uint32_t gid) {
    if (sv.privileged) {
        if (setgroups(0, NULL) != 0 || setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0)
            return -1;
    } else if (uid != sv.uid || gid != sv.gid) {
        errno = EPERM;
        return -1;
    }
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    return 0;
}

void path_copy(char out[PATH_LIMIT + 1], struct span s) {
    size_t n = s.n <= PATH_LIMIT ? s.n : PATH_LIMIT;
    memcpy(out, s.p, n);
    out[n] = 0;
}

int open_path(int base, const char *path, int flags, mode_t mode, bool beneath) {
    struct open_how how = {
        .flags = (uint64_t)(flags | O_CLOEXEC),
        .mode = flags & O_CREAT ? mode & 07777 : 0,
        .resolve = RESOLVE_NO_MAGICLINKS | (beneath ? RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS : 0),
    };
    if (!(flags & O_PATH))
        how.flags |= O_NONBLOCK | O_NOCTTY;
    int fd;
    for (int tries = 0; tries < 16; tries++) {
        fd = (int)syscall(SYS_openat2, base, path, &how, sizeof how);
        if (fd >= 0 || (errno != EAGAIN && errno != EINTR))
            break;
    }
    return fd;
}

/* Splits `path` at its last component, without trailing slashes. Returns the length of the directory part, or -1. */
static long split(const char *path, char name[256]) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t start = end;
    while (start > 0 && path[start - 1] != '/')
        start--;
    size_t n = end - start;
    if (n > 255)
        errno = ENAMETOOLONG;
    else if (n == 0)
        errno = EBUSY;
    else if (path[start] == '.' && (n == 1 || (n == 2 && path[start + 1] == '.')))
        errno = EINVAL;
    else {
        memcpy(name, path + start, n);
        name[n] = 0;
        return (long)start;
    }
    return -1;
}

static void parent_of(char out[PATH_LIMIT + 1], const char *path, long start) {
    if (start == 0) {
        strcpy(out, ".");
        return;
    }
    memcpy(out, path, (size_t)start);
    out[start] = 0;
}

int open_parent(int base, const char *path, bool beneath, char name[256]) {
    long start = split(path, name);
    if (start < 0)
        return -1;
    char dir[PATH_LIMIT + 1];
    parent_of(dir, path, start);
    return open_path(base, dir, O_PATH | O_DIRECTORY, 0, beneath);
}

/* One step of make_dirs: enters `name` below `at`, making it first when it is missing. Takes over `at`. */
static int enter(int at, const char *name, mode_t mode, bool beneath, bool *made) {
    *made = mkdirat(at, name, mode) == 0;
    if (!*made && errno != EEXIST) {
        int err = errno;
        int fd = open_path(at, name, O_PATH | O_DIRECTORY, 0, beneath); /* EROFS, EACCES: it may exist all the same */
        close(at);
        if (fd < 0)
            errno = err;
        return fd;
    }
    int fd = open_path(at, name, O_PATH | O_DIRECTORY, 0, beneath);
    int err = errno;
    close(at);
    errno = err;
    return fd;
}

int make_dirs(int base, const char *path, mode_t mode, bool beneath, bool final_too) {
    int at = open_path(base, *path == '/' ? "/" : ".", O_PATH | O_DIRECTORY, 0, beneath && *path != '/');
    if (beneath && *path == '/') {
        if (at >= 0)
            close(at);
        errno = EXDEV;
        return -1;
    }
    const char *p = path;
    while (at >= 0) {
        char name[256];
        while (*p == '/')
            p++;
        size_t n = strcspn(p, "/");
        const char *rest = p + n + strspn(p + n, "/");
        if (n == 0 || (*rest == 0 && !final_too))
            break;
        if (n > 255) {
            close(at);
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(name, p, n);
        name[n] = 0;
        bool made;
        at = enter(at, name, *rest ? 0755 : mode, beneath, &made);
        p = rest;
    }
    return at;
}

int make_parents(int base, const char *path, bool beneath) {
    int fd = make_dirs(base, path, 0755, beneath, false);
    if (fd >= 0)
        close(fd);
    return fd < 0 ? -1 : 0;
}

uint8_t type_of(mode_t mode) {
    switch (mode & S_IFMT) {
    case S_IFREG: return 1;
    case S_IFDIR: return 2;
    case S_IFLNK: return 3;
    case S_IFIFO: return 4;
    case S_IFSOCK: return 5;
    case S_IFCHR: return 6;
    case S_IFBLK: return 7;
    default: return 1;
    }
}

static int64_t ns_of(struct timespec t) {
    const int64_t limit = INT64_MAX / 1000000000;
    if (t.tv_sec >= limit)
        return INT64_MAX;
    if (t.tv_sec <= -limit)
        return -INT64_MAX;
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct timespec time_of(int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    if (t.tv_nsec < 0) {
        t.tv_sec--;
        t.tv_nsec += 1000000000;
    }
    return t;
}

void put_entry(struct writer *w, const char *name, const struct stat *st, const char *target) {
    put_bytes(w, name, strlen(name));
    put_u8(w, type_of(st->st_mode));
    put_u32(w, st->st_mode & 07777);
    put_u64(w, (uint64_t)st->st_size);
    put_u32(w, st->st_uid);
    put_u32(w, st->st_gid);
    put_u64(w, (uint64_t)ns_of(st->st_mtim));
    put_u64(w, st->st_ino);
    put_u32(w, (uint32_t)st->st_nlink);
    put_bytes(w, target, strlen(target));
}

size_t read_link(int dirfd, const char *name, char out[PATH_LIMIT + 1]) {
    ssize_t n = readlinkat(dirfd, name, out, PATH_LIMIT);
    out[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

void proc_fd_path(char out[32], int fd) { snprintf(out, 32, "/proc/self/fd/%d", fd); }
