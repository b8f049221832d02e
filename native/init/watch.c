/* WATCH: inotify on one path, or on every directory below it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "init.h"

#define DIRS_LIMIT 8192u
#define EVENT_ROOM (PATH_LIMIT + 64u)
#define EVENTS_FRAME 65536u
#define MASK (IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF)

enum { CREATED = 1, MODIFIED, REMOVED, MOVED_FROM, MOVED_TO, ATTRIBUTES, OVERFLOW_ };

struct place {
    int wd;
    char *path;                      /* relative to the watched one; "" is itself */
};

struct watch {
    struct op op;
    struct io io;
    int root;
    uint32_t uid, gid;
    bool recursive, directory;
    struct place *places;
    uint32_t n, cap;
    uint32_t count;                  /* events in the frame being written */
    bool lost;
    char *moved;                     /* a directory that was moved from here; where to, the next event says */
    uint32_t cookie;
};

static void put_event(struct watch *t, struct writer *w, uint8_t what, bool dir, const char *path, uint32_t cookie) {
    if (w->cap - w->len < EVENT_ROOM) {
        t->lost = true;
        return;
    }
    put_u8(w, what);
    put_u8(w, dir);
    put_bytes(w, *path ? path : ".", *path ? strlen(path) : 1);
    put_u32(w, cookie);
    t->count++;
}

static struct place *place_of(struct watch *t, int wd) {
    for (uint32_t i = 0; i < t->n; i++)
        if (t->places[i].wd == wd)
            return &t->places[i];
    return NULL;
}

static bool knows(const struct watch *t, const char *path) {
    for (uint32_t i = 0; i < t->n; i++)
        if (strcmp(t->places[i].path, path) == 0)
            return true;
    return false;
}

static void place_drop(struct watch *t, struct place *p) {
    free(p->path);
    *p = t->places[--t->n];
}

static int place_add(struct watch *t, int wd, const char *path) {
    struct place *old = place_of(t, wd);
    char *copy = strdup(path);
    if (!copy)
        return ENOMEM;
    if (old) { /* a directory that was moved inside the tree */
        free(old->path);
        old->path = copy;
        return 0;
    }
    if (t->n == t->cap) {
        uint32_t cap = t->cap ? t->cap * 2 : 16;
        struct place *grown = realloc(t->places, cap * sizeof *grown);
        if (!grown) {
            free(copy);
            return ENOMEM;
        }
        t->places = grown;
        t->cap = cap;
    }
    t->places[t->n++] = (struct place){wd, copy};
    return 0;
}

/* inotify takes paths only; the magic link names exactly what was opened. */
static int add_fd(struct watch *t, int fd, const char *path) {
    char self[32];
    if (t->n >= DIRS_LIMIT)
        return ENOSPC;
    proc_fd_path(self, fd);
    int wd = inotify_add_watch(t->io.fd, self, MASK);
    return wd < 0 ? errno : place_add(t, wd, path);
}

static bool join(char out[PATH_LIMIT + 1], const char *dir, const char *name) {
    size_t d = strlen(dir), n = strlen(name);
    if (d + 1 + n > PATH_LIMIT)
        return false;
    memcpy(out, dir, d);
    if (d)
        out[d++] = '/';
    memcpy(out + d, name, n + 1);
    return true;
}

static bool is_directory(int fd, const struct dirent_raw *e) {
    struct stat st;
    if (e->type != 0)
        return e->type == 4;
    return fstatat(fd, e->name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

/* One directory: a watch on it; its directories go to the list; what is in it is announced when `w` is given. */
static int add_one(struct watch *t, const char *path, struct writer *w, char ***list, uint32_t *n) {
    _Alignas(struct dirent_raw) char buf[4096], child[PATH_LIMIT + 1];
    int fd = open_path(t->root, *path ? path : ".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0, true);
    int err = fd < 0 ? errno : add_fd(t, fd, path);
    for (long got; !err && (got = syscall(SYS_getdents64, fd, buf, sizeof buf)) > 0;) {
        for (long at = 0; at < got && !err;) {
            struct dirent_raw *e = (struct dirent_raw *)(void *)(buf + at);
            at += e->reclen;
            if (strcmp(e->name, ".") == 0 || strcmp(e->name, "..") == 0 || !join(child, path, e->name))
                continue;
            bool dir = is_directory(fd, e);
            if (w)
                put_event(t, w, CREATED, dir, child, 0);
            if (!dir)
                continue;
            char **grown = *n >= DIRS_LIMIT ? NULL : realloc(*list, (*n + 1) * sizeof *grown);
            if (grown)
                *list = grown;
            if (!grown || !(grown[*n] = strdup(child)))
                err = ENOSPC;
            else
                ++*n;
        }
    }
    if (fd >= 0)
        close(fd);
    return err;
}

/* Watches a directory and all below it. Those that vanish or may not be read are left out. */
static int add_below(struct watch *t, const char *path, struct writer *w) {
    char **list = NULL;
    uint32_t n = 0;
    int err = add_one(t, path, w, &list, &n);
    while (n) {
        char *next = list[--n];
        if (!err || err == ENOENT || err == EACCES || err == ENOTDIR || err == ELOOP)
            err = add_one(t, next, w, &list, &n);
        free(next);
    }
    free(list);
    return err == ENOENT || err == EACCES || err == ENOTDIR || err == ELOOP ? 0 : err;
}

static bool lies_below(const struct place *p, const char *path) {
    size_t n = strlen(path);
    return strncmp(p->path, path, n) == 0 && (p->path[n] == 0 || p->path[n] == '/');
}

/* Forgets what was known below a directory that was moved away. */
static void drop_below(struct watch *t, const char *path) {
    for (uint32_t i = 0; i < t->n;) {
        struct place *p = &t->places[i];
        if (lies_below(p, path)) {
            inotify_rm_watch(t->io.fd, p->wd);
            place_drop(t, p);
        } else {
            i++;
        }
    }
}

/* All anew, and the engine is told to look anew too. What is still queued names watches that are gone, and is passed over. */
static void rebuild(struct watch *t) {
    while (t->n) {
        inotify_rm_watch(t->io.fd, t->places[0].wd);
        place_drop(t, &t->places[0]);
    }
    add_below(t, "", NULL);
    t->lost = true;
}

/* The watches go on, so that nothing that happens meanwhile is missed; only their paths change. */
static void move_below(struct watch *t, const char *from, const char *to) {
    for (uint32_t i = 0; i < t->n; i++) {
        struct place *p = &t->places[i];
        if (!lies_below(p, from))
            continue;
        char path[PATH_LIMIT + 1];
        const char *rest = p->path + strlen(from);
        char *copy = strlen(to) + strlen(rest) > PATH_LIMIT ? NULL : strdup(strcat(strcpy(path, to), rest));
        t->lost |= !copy;
        if (copy) {
            free(p->path);
            p->path = copy;
        }
    }
}

/* A directory that is moved within the tree gives two events, one after the other. The watches below it are dropped
 * when the second is another. */
static void departed(struct watch *t, uint32_t cookie, const char *path) {
    t->moved = strdup(path);
    t->cookie = cookie;
    if (!t->moved)
        drop_below(t, path);
}

static void moved_is_known(struct watch *t) {
    free(t->moved);
    t->moved = NULL;
}

static bool is_arrival(const struct watch *t, const struct inotify_event *e) {
    return t->moved && (e->mask & IN_MOVED_TO) && e->cookie == t->cookie;
}

/* Where a directory was known already, it was replaced, or the two were exchanged. An exchange is told as two moves: after the
 * first, both are known by one name, and nothing tells which of them the second is about. */
static void arrived(struct watch *t, const struct inotify_event *e, const char *path, struct writer *w) {
    const char *from = is_arrival(t, e) ? t->moved : NULL;
    if (knows(t, path))
        rebuild(t);
    else if (from && knows(t, from))
        move_below(t, from, path);
    else if (add_below(t, path, from ? w : NULL) != 0) /* from inside: it was moved before it could be watched */
        t->lost = true;
    moved_is_known(t);
}

static uint8_t what_of(uint32_t mask) {
    if (mask & IN_CREATE)
        return CREATED;
    if (mask & IN_MODIFY)
        return MODIFIED;
    if (mask & (IN_DELETE | IN_DELETE_SELF))
        return REMOVED;
    if (mask & IN_MOVED_FROM)
        return MOVED_FROM;
    return mask & IN_MOVED_TO ? MOVED_TO : ATTRIBUTES;
}

static void translate(struct watch *t, const struct inotify_event *e, struct writer *w) {
    char path[PATH_LIMIT + 1];
    if (e->mask & IN_Q_OVERFLOW) {
        t->lost = true;
        return;
    }
    if (t->moved && !is_arrival(t, e)) {
        drop_below(t, t->moved);
        moved_is_known(t);
    }
    struct place *p = place_of(t, e->wd);
    if (!p)
        return;
    if (e->mask & IN_IGNORED) {
        place_drop(t, p);
        return;
    }
    /* The parent reports the removal and attributes of a directory below the watched one. */
    if (!e->len && *p->path)
        return;
    if (!join(path, p->path, e->len ? e->name : ""))
        return;
    if (!e->len)
        path[0] = 0;
    bool dir = (e->mask & IN_ISDIR) || (!e->len && t->directory);
    put_event(t, w, what_of(e->mask), dir, path, e->cookie);
    if (!t->recursive || !dir || !e->len)
        return;
    if (e->mask & IN_MOVED_FROM) {
        departed(t, e->cookie, path);
    } else if (e->mask & IN_MOVED_TO) {
        arrived(t, e, path, w);
    } else if ((e->mask & IN_CREATE) && add_below(t, path, w) != 0) {
        t->lost = true;
    }
}

static void send_events(struct watch *t, struct writer *w) {
    if (t->lost) {
        w->cap += EVENT_ROOM; /* kept free for this one */
        put_event(t, w, OVERFLOW_, false, "", 0);
        t->lost = false;
    }
    if (!t->count)
        return;
    patch_u32(w, 0, t->count);
    send_frame(K_EVENTS, 0, t->op.channel->id, w->p, w->len);
}

static bool watch_pump(struct op *op) {
    struct watch *t = (struct watch *)op;
    _Alignas(struct inotify_event) char buf[4096];
    if (!t->io.in || !conn_can_send())
        return false;
    ssize_t n = read(t->io.fd, buf, sizeof buf);
    if (n <= 0) {
        t->io.in = n < 0 && errno == EINTR;
        return t->io.in;
    }
    struct writer w = writer_of(sv.scratch, FRAME_MAX - EVENT_ROOM);
    t->count = 0;
    put_u32(&w, 0);
    if (identity_enter(t->uid, t->gid) != 0)
        t->lost = true;
    for (ssize_t at = 0; at < n;) {
        const struct inotify_event *e = (const struct inotify_event *)(const void *)(buf + at);
        at += (ssize_t)(sizeof *e + e->len);
        translate(t, e, &w);
    }
    identity_leave();
    send_events(t, &w);
    return true;
}

static void watch_release(struct op *op) {
    struct watch *t = (struct watch *)op;
    free(t->moved);
    io_close(&t->io);
    if (t->root >= 0)
        close(t->root);
    for (uint32_t i = 0; i < t->n; i++)
        free(t->places[i].path);
    free(t->places);
}

static const struct op_type watch_type = {.pump = watch_pump, .release = watch_release};

static int begin(struct watch *t, const struct request *q) {
    char path[PATH_LIMIT + 1];
    struct stat st;
    path_copy(path, q->path);
    if (identity_enter(q->uid, q->gid) != 0)
        return errno;
    t->root = open_path(AT_FDCWD, path, O_PATH, 0, false);
    if (t->root < 0 || fstat(t->root, &st) != 0)
        return errno;
    t->directory = S_ISDIR(st.st_mode);
    return t->recursive && t->directory ? add_below(t, "", NULL) : add_fd(t, t->root, "");
}

void watch_start(const struct request *q) {
    struct watch *t = (struct watch *)op_new(sizeof *t, &watch_type, q->channel, 0);
    if (!t)
        return;
    t->root = t->io.fd = -1;
    t->uid = q->uid;
    t->gid = q->gid;
    t->recursive = q->bits;
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (fd >= 0)
        io_watch(&t->io, fd, EPOLLET);
    int err = fd < 0 ? errno : begin(t, q);
    identity_leave();
    if (err)
        op_fail(&t->op, err, err == ENOSPC ? CODE_BOUND : CODE_ERRNO, "the path cannot be watched");
    else
        send_ok(q->channel);
}
