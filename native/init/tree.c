/* Process trees, by what /proc shows. A process without children has no descendants, because orphans come back to the
 * nearest subreaper: so "no child is left" is the exact end of killing a tree. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "init.h"

#define PIDS_LIMIT 262144u
#define HELD_LIMIT 4096u             /* descriptors of processes held at once */
#define TOP UINT32_MAX               /* `above` of the caller's own children */

/* A process below the caller, after its parent in the list. */
struct member {
    pid_t pid;
    uint32_t above;                  /* index of its parent */
    int fd;
};

struct pids {
    struct member *p;
    uint32_t n, cap;
};

struct names {
    int fd;
    _Alignas(struct dirent_raw) char buf[4096];
    long n, at;
};

static bool pids_add(struct pids *l, pid_t pid, uint32_t above) {
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? l->cap * 2 : 64;
        struct member *grown = cap > PIDS_LIMIT ? NULL : realloc(l->p, cap * sizeof *grown);
        if (!grown)
            return false;
        l->p = grown;
        l->cap = cap;
    }
    l->p[l->n++] = (struct member){pid, above, -1};
    return true;
}

static bool names_open(struct names *d, const char *path) {
    d->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    d->n = d->at = 0;
    return d->fd >= 0;
}

/* The next numeric name, or 0 at the end (and the directory is closed). */
static pid_t names_next(struct names *d) {
    for (;;) {
        if (d->at >= d->n) {
            d->n = syscall(SYS_getdents64, d->fd, d->buf, sizeof d->buf);
            d->at = 0;
            if (d->n <= 0) {
                close(d->fd);
                return 0;
            }
        }
        struct dirent_raw *e = (struct dirent_raw *)(void *)(d->buf + d->at);
        d->at += e->reclen;
        if (e->name[0] >= '1' && e->name[0] <= '9')
            return (pid_t)atoi(e->name);
    }
}

/* Adds the children listed in one `children` file; false when it cannot be opened. */
static bool add_children_file(struct pids *l, const char *path, uint32_t above) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    _Alignas(struct dirent_raw) char buf[4096];
    pid_t pid = 0;
    for (ssize_t n; (n = read(fd, buf, sizeof buf)) > 0;) {
        for (ssize_t i = 0; i < n; i++) {
            if (buf[i] >= '0' && buf[i] <= '9') {
                pid = pid * 10 + (buf[i] - '0');
            } else if (pid) {
                pids_add(l, pid, above);
                pid = 0;
            }
        }
    }
    close(fd);
    return true;
}

static bool add_children(struct pids *l, pid_t parent, uint32_t above) {
    char path[64];
    struct names tasks;
    snprintf(path, sizeof path, "/proc/%d/task", (int)parent);
    if (!names_open(&tasks, path))
        return false;
    bool any = false;
    for (pid_t tid; (tid = names_next(&tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)parent, (int)tid);
        any |= add_children_file(l, path, above);
    }
    return any;
}

static pid_t parent_in_stat(pid_t pid) {
    char path[32], buf[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, buf, sizeof buf - 1);
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return 0;
    buf[n] = 0;
    char *p = strrchr(buf, ')'); /* the name may contain anything; what follows does not */
    return p && strlen(p) > 4 ? (pid_t)atoi(p + 4) : 0;
}

/* Where the kernel has no `children` files: parents of all processes, then the closure below `root`. There `above` is
 * the parent's number. */
static void scan_all(struct pids *l, pid_t root) {
    struct pids all = {0};
    struct names proc;
    if (!names_open(&proc, "/proc"))
        return;
    for (pid_t pid; (pid = names_next(&proc));) {
        pid_t parent = parent_in_stat(pid);
        if (parent)
            pids_add(&all, pid, (uint32_t)parent);
    }
    for (uint32_t done = 0; done <= l->n; done++) {
        pid_t above = done == 0 ? root : l->p[done - 1].pid;
        for (uint32_t i = 0; i < all.n; i++)
            if (all.p[i].above == (uint32_t)above)
                pids_add(l, all.p[i].pid, done == 0 ? TOP : done - 1);
    }
    free(all.p);
}

static struct pids below(pid_t root) {
    struct pids l = {0};
    if (!add_children(&l, root, TOP)) {
        scan_all(&l, root);
        return l;
    }
    for (uint32_t i = 0; i < l.n; i++)
        add_children(&l, l.p[i].pid, i);
    return l;
}

/* Not ended, or at least not reaped: its number is its own. */
static bool lasts(int fd) { return syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0) == 0 || errno != ESRCH; }

/* A descriptor of a process that is surely the child of a held one (or of one of our own children, whose numbers are
 * their own because nobody else reaps them), or -1. The number may be another process's by now: so what it is is read
 * between opening it and seeing that it and its parent were still there. */
static int hold(const struct pids *l, const struct member *m) {
    const struct member *parent = &l->p[m->above];
    if (parent->above != TOP && parent->fd < 0)
        return -1;
    int fd = (int)syscall(SYS_pidfd_open, m->pid, 0);
    if (fd < 0)
        return -1;
    if (parent_in_stat(m->pid) == parent->pid && lasts(fd) && (parent->above == TOP || lasts(parent->fd)))
        return fd;
    close(fd);
    return -1;
}

/* What cannot be held now (it changed meanwhile, or there are too many) becomes our own child when its parents are dead. */
void tree_kill_once(void) {
    struct pids l = below(getpid());
    uint32_t held = 0;
    for (uint32_t i = 0; i < l.n && held < HELD_LIMIT; i++)
        if (l.p[i].above != TOP && (l.p[i].fd = hold(&l, &l.p[i])) >= 0)
            held++;
    for (uint32_t i = 0; i < l.n; i++) {
        if (l.p[i].above == TOP)
            kill(l.p[i].pid, SIGKILL);
        if (l.p[i].fd < 0)
            continue;
        syscall(SYS_pidfd_send_signal, l.p[i].fd, SIGKILL, NULL, 0);
        close(l.p[i].fd);
    }
    free(l.p);
}

static uint32_t count_all(void) {
    struct names proc;
    uint32_t n = 0;
    if (!names_open(&proc, "/proc"))
        return 0;
    while (names_next(&proc))
        n++;
    return n ? n - 1 : 0;
}

uint32_t tree_count(void) {
    if (sv.pidns)
        return count_all();
    struct pids l = below(getpid());
    free(l.p);
    return l.n;
}

static uint64_t micros(struct timeval t) { return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_usec; }

void usage_add(struct tree_usage *u, const struct rusage *ru) {
    u->user_us += micros(ru->ru_utime);
    u->system_us += micros(ru->ru_stime);
    if ((uint64_t)ru->ru_maxrss > u->maxrss_kib)
        u->maxrss_kib = (uint64_t)ru->ru_maxrss;
}

void usage_join(struct tree_usage *u, const struct tree_usage *more) {
    u->user_us += more->user_us;
    u->system_us += more->system_us;
    if (more->maxrss_kib > u->maxrss_kib)
        u->maxrss_kib = more->maxrss_kib;
}

/* Reaps what has ended. False: there is no child. */
static bool reap_children(pid_t leader, int *leader_status, struct tree_usage *usage) {
    for (;;) {
        int status;
        struct rusage ru;
        pid_t pid = wait4(-1, &status, WNOHANG, &ru);
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid < 0)
            return false;
        if (pid == 0)
            return true;
        if (pid == leader && leader_status)
            *leader_status = status;
        if (usage)
            usage_add(usage, &ru);
    }
}

bool tree_kill(uint64_t until, pid_t leader, int *leader_status, struct tree_usage *usage) {
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    if (leader > 0) /* where /proc cannot be read this is what is left */
        kill(-leader, SIGKILL);
    for (long pause = 200000; reap_children(leader, leader_status, usage);) {
        tree_kill_once();
        if (now_ns() >= until)
            return !reap_children(leader, leader_status, usage);
        struct timespec t = {0, pause};
        sigtimedwait(&child, NULL, &t);
        if (pause < 10000000)
            pause *= 2;
    }
    return true;
}
