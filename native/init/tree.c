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

struct pids {
    pid_t *p;
    uint32_t n, cap;
};

struct names {
    int fd;
    _Alignas(struct dirent_raw) char buf[4096];
    long n, at;
};

static bool pids_add(struct pids *l, pid_t pid) {
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? l->cap * 2 : 64;
        pid_t *grown = cap > PIDS_LIMIT ? NULL : realloc(l->p, cap * sizeof *grown);
        if (!grown)
            return false;
        l->p = grown;
        l->cap = cap;
    }
    l->p[l->n++] = pid;
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
static bool add_children_file(struct pids *l, const char *path) {
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
                pids_add(l, pid);
                pid = 0;
            }
        }
    }
    close(fd);
    return true;
}

static bool add_children(struct pids *l, pid_t parent) {
    char path[64];
    struct names tasks;
    snprintf(path, sizeof path, "/proc/%d/task", (int)parent);
    if (!names_open(&tasks, path))
        return false;
    bool any = false;
    for (pid_t tid; (tid = names_next(&tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)parent, (int)tid);
        any |= add_children_file(l, path);
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

/* Where the kernel has no `children` files: parents of all processes, then the closure below `root`. */
static void scan_all(struct pids *l, pid_t root) {
    struct pids all = {0}, parents = {0};
    struct names proc;
    if (!names_open(&proc, "/proc"))
        return;
    for (pid_t pid; (pid = names_next(&proc));) {
        pid_t parent = parent_in_stat(pid);
        if (parent && pids_add(&all, pid) && !pids_add(&parents, parent))
            all.n--;
    }
    for (uint32_t done = 0; done <= l->n; done++) {
        pid_t above = done == 0 ? root : l->p[done - 1];
        for (uint32_t i = 0; i < all.n; i++)
            if (parents.p[i] == above)
                pids_add(l, all.p[i]);
    }
    free(all.p);
    free(parents.p);
}

static struct pids below(pid_t root) {
    struct pids l = {0};
    if (!add_children(&l, root)) {
        scan_all(&l, root);
        return l;
    }
    for (uint32_t i = 0; i < l.n; i++)
        add_children(&l, l.p[i]);
    return l;
}

void tree_kill_once(void) {
    struct pids l = below(getpid());
    for (uint32_t i = 0; i < l.n; i++)
        kill(l.p[i], SIGKILL);
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
