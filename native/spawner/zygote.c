/* Zygotes and seeds: what of a sandbox can be made before it is asked for.
 *
 * A *zygote* is a small process that belongs to one slot for as long as it lives: it has joined the slot's version 1 cgroups and
 * holds the slot's user namespace. Whatever it forks is in those cgroups from birth. (Joining later costs time in every
 * group, and now and then a grace period of RCU: 10 ms and more, during which no process of the machine can fork.)
 *
 * A *seed* is a process forked by a zygote that has done all set-up which depends on nothing of the sandbox: its namespaces, fresh,
 * and the mounts of /proc and /dev. It waits for one CREATE and becomes that sandbox's init, or it ends. Every seed is used once.
 *
 * Without a seed that is ready, a sandbox's process does everything itself. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawner.h"

#define PATIENCE_NS 1000000000u /* for a zygote to fork */
#define LONG_PATIENCE_NS 5000000000u /* for a zygote to join its groups, and for a seed to be ready */
#define BARREN_NS 1000000000u
#define GONE (-1) /* the pid of a zygote that was reaped */
#define SOON_NS 3000000u /* the sandbox that was just made comes first */

pid_t clone_into(const struct spawner *s, uint32_t slot, uint64_t flags) {
    struct clone_args args = {.flags = flags, .exit_signal = flags & CLONE_PARENT ? 0 : SIGCHLD};
    if (s->config.level == LEVEL_CONTAINER) args.flags |= CLONE_NEWPID;
    int group = slot_v2_dir(s, slot);
    if (group >= 0) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)group;
    }
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    int err = errno;
    if (group >= 0 && pid) close(group);
    errno = err;
    return pid;
}

/* ---- in the zygote ---- */

/* A copy of another's socket would keep that from noticing its end; one of an id block's lock would keep the block. */
static void keep_needed(const struct spawner *s, int own) {
    int fds[GROUPS_MAX + 8] = {own, s->init_exe, s->null, s->proc, s->blank, s->world};
    size_t n = 6;
    for (unsigned i = 0; i < s->n_groups; i++) fds[n++] = s->groups[i].dir;
    keep_only(fds, n);
}

static void zygote_fork(const struct spawner *s, uint32_t slot, int users, int own, int seed_end) {
    int32_t pid = clone_into(s, slot, CLONE_PARENT);
    if (pid == 0) {
        close(own);
        child_seed(s, slot, users, seed_end);
    }
    if (pid < 0) pid = -errno;
    if (send(own, &pid, sizeof pid, MSG_NOSIGNAL) < 0) _exit(0);
}

static _Noreturn void zygote_run(const struct spawner *s, uint32_t slot, int own) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "dsec-zygote");
    setpriority(PRIO_PROCESS, 0, 0); /* nobody waits for what is made ahead */
    keep_needed(s, own);
    int32_t err = slot_join_v1(s, slot);
    int users = s->config.level == LEVEL_CONTAINER && !err ? users_make(s->proc, s->proc, slot_uid(slot)) : -1;
    if (s->config.level == LEVEL_CONTAINER && !err && users < 0) err = errno;
    if (send(own, &err, sizeof err, MSG_NOSIGNAL) < 0 || err) _exit(0);
    for (char order;;) {
        int seed_end;
        unsigned n = 1;
        if (receive_fds(own, &order, 1, &seed_end, &n, 0) != 1 || n != 1) _exit(0); /* let go, or the spawner is gone */
        zygote_fork(s, slot, users, own, seed_end);
        close(seed_end);
    }
}

/* ---- in the spawner ---- */

/* Where control groups of both versions are there, those of version 2 tell which processes are the sandbox's (a zygote never is);
 * version 1 alone could not, and its freezer would wait for the zygote too. */
static bool worth_it(const struct spawner *s) {
    bool v1 = false, v2 = false;
    for (unsigned i = 0; i < s->n_groups; i++) *(s->groups[i].v2 ? &v2 : &v1) = true;
    return s->root && (v2 || !v1);
}

static struct zygote *unused(struct spawner *s) {
    for (unsigned i = 0; i < ZYGOTES; i++)
        if (!s->zygotes[i].pid) return &s->zygotes[i];
    return NULL;
}

static struct zygote *zygote_of(struct spawner *s, uint32_t slot) {
    for (unsigned i = 0; i < ZYGOTES; i++)
        if (s->zygotes[i].pid && s->zygotes[i].slot == slot) return &s->zygotes[i];
    return NULL;
}

static struct zygote *by_pid(struct spawner *s, pid_t pid) {
    for (unsigned i = 0; pid && i < ZYGOTES; i++)
        if (s->zygotes[i].pid == pid || s->zygotes[i].seed == pid) return &s->zygotes[i];
    return NULL;
}

static void drop_seed(struct spawner *s, struct zygote *z) {
    if (z->seed_end >= 0) unwatch(s, z->seed_end);
    z->seed_end = -1;
    z->seed = 0;
    z->ordered = false;
    z->late_at = 0;
    z->ready = false;
}

/* Both would end by themselves when their sockets close, unless they were stopped. Neither has been reaped: the pids are theirs. */
static void let_go(struct spawner *s, struct zygote *z) {
    if (z->pid > 0) kill(z->pid, SIGKILL);
    if (z->seed) kill(z->seed, SIGKILL);
    drop_seed(s, z);
    unwatch(s, z->end);
    slot_share(s, z->slot, false);
    if (!z->busy) slot_at(s, z->slot)->used = false;
    *z = (struct zygote){.end = -1, .seed_end = -1};
}

static bool zygote_start(struct spawner *s, struct zygote *z, uint32_t slot) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return false;
    pid_t pid = fork();
    if (pid == 0) zygote_run(s, slot, pair[1]);
    close(pair[1]);
    if (pid < 0) {
        close(pair[0]);
        return false;
    }
    *z = (struct zygote){.pid = pid, .slot = slot, .end = pair[0], .seed_end = -1, .late_at = boottime_ns() + LONG_PATIENCE_NS};
    slot_share(s, slot, true);
    listen_to(s, z->end, FROM_ZYGOTE, pid);
    return true;
}

/* What cannot be made now is not tried again for a while: every sandbox's own process can do without. */
static void barren(struct spawner *s, struct zygote *z, int err) {
    if (!s->barren_until) note("zygote", "", err);
    s->barren_until = boottime_ns() + BARREN_NS;
    let_go(s, z);
}

/* Its pid comes by the zygote's socket; until then nobody listens to the seed itself. */
static void order_seed(struct spawner *s, struct zygote *z) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return;
    bool sent = send_fds(z->end, "s", 1, &pair[1], 1);
    close(pair[1]);
    z->seed_end = pair[0];
    z->ordered = true;
    z->late_at = boottime_ns() + PATIENCE_NS;
    if (!sent) barren(s, z, EIO);
}

static bool any_ordered(const struct spawner *s) {
    bool any = false;
    for (unsigned i = 0; i < ZYGOTES; i++) any |= s->zygotes[i].ordered;
    return any;
}

/* Whether a seed was reaped before its pid was known to be one's. */
static bool strayed(struct spawner *s, pid_t pid) {
    bool found = false;
    for (unsigned i = 0; i < s->n_strays && i < STRAYS; i++) found |= s->strays[i] == pid;
    found |= s->n_strays > STRAYS; /* more than are remembered: it may have been among them */
    if (!any_ordered(s)) s->n_strays = 0;
    return found;
}

static void seed_told(struct spawner *s, struct zygote *z, int32_t pid) {
    z->ordered = false;
    z->late_at = boottime_ns() + LONG_PATIENCE_NS;
    if (pid <= 0 || strayed(s, pid)) return barren(s, z, pid < 0 ? -pid : ECHILD);
    z->seed = pid;
    listen_to(s, z->seed_end, FROM_ZYGOTE, pid);
}

/* Makes room: a zygote whose sandbox runs has nothing to do before that ends. */
static struct zygote *make_room(struct spawner *s) {
    struct zygote *oldest = NULL;
    for (unsigned i = 0; i < ZYGOTES; i++) {
        struct zygote *z = &s->zygotes[i];
        if (z->busy && (!oldest || z->since < oldest->since)) oldest = z;
    }
    if (oldest) let_go(s, oldest);
    return oldest;
}

static void add_zygote(struct spawner *s) {
    const char *step;
    struct zygote *z = unused(s);
    if (!z && !(z = make_room(s))) return;
    long slot = slot_reserve(s, &step);
    if (slot >= 0 && !zygote_start(s, z, (uint32_t)slot)) slot_at(s, (uint32_t)slot)->used = false;
}

static unsigned coming(const struct spawner *s) {
    unsigned n = 0;
    for (unsigned i = 0; i < ZYGOTES; i++) n += s->zygotes[i].pid && !s->zygotes[i].busy && (s->zygotes[i].seed || s->zygotes[i].ordered || !s->zygotes[i].joined);
    return n;
}

static struct zygote *any_ready(struct spawner *s) {
    for (unsigned i = 0; i < ZYGOTES; i++)
        if (s->zygotes[i].ready) return &s->zygotes[i];
    return NULL;
}

void seeds_refill_soon(struct spawner *s) {
    if (!any_ready(s)) return seeds_refill(s);
    if (!s->refill_at) s->refill_at = boottime_ns() + SOON_NS;
}

int seeds_wait_ms(const struct spawner *s) {
    uint64_t at = s->refill_at;
    for (unsigned i = 0; i < ZYGOTES; i++) {
        uint64_t late = s->zygotes[i].late_at;
        if (late && (!at || late < at)) at = late;
    }
    uint64_t now = at ? boottime_ns() : 0;
    return !at ? -1 : at <= now ? 0 : (int)((at - now) / 1000000u + 1);
}

/* One that was stopped from outside, say. (One that has a sandbox is no seed any more: see `late_at` of that.) */
static void drop_late(struct spawner *s) {
    uint64_t now = boottime_ns();
    for (unsigned i = 0; i < ZYGOTES; i++)
        if (s->zygotes[i].late_at && s->zygotes[i].late_at <= now) barren(s, &s->zygotes[i], ETIMEDOUT);
    if (!any_ordered(s)) s->n_strays = 0;
}

void seeds_refill(struct spawner *s) {
    s->refill_at = 0;
    drop_late(s);
    if (!worth_it(s) || s->stopping || boottime_ns() < s->barren_until) return;
    unsigned n = coming(s);
    for (unsigned i = 0; i < ZYGOTES && n < SEEDS; i++) {
        struct zygote *z = &s->zygotes[i];
        if (!z->pid || z->busy || !z->joined || z->seed || z->ordered) continue;
        order_seed(s, z);
        n++;
    }
    for (; n < SEEDS; n++) add_zygote(s);
}

/* It has joined, or cannot; it has forked; it has ended. */
static void zygote_news(struct spawner *s, struct zygote *z) {
    int32_t err = EIO;
    ssize_t n = recv(z->end, &err, sizeof err, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n == sizeof err && z->ordered) return seed_told(s, z, err);
    if (n != sizeof err || err || z->joined) return barren(s, z, err);
    z->joined = true;
    z->late_at = 0;
    seeds_refill(s);
}

/* It is ready, or has ended. What failed in it will fail, and be told, in a sandbox's own process. */
static void seed_news(struct spawner *s, struct zygote *z) {
    uint8_t word[96];
    ssize_t n = recv(z->seed_end, word, sizeof word, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n != 1 || z->ready) return barren(s, z, EIO);
    z->ready = true;
    z->late_at = 0;
}

void zygotes_news(struct spawner *s, pid_t pid) {
    struct zygote *z = by_pid(s, pid);
    if (!z) return;
    if (z->pid == pid) zygote_news(s, z);
    else seed_news(s, z);
}

/* A child that is no sandbox was reaped: one of these, or an orphan of a sandbox of level `process`. */
void child_ended(struct spawner *s, pid_t pid) {
    struct zygote *z = by_pid(s, pid);
    if (z && z->pid == pid) z->pid = GONE;
    else if (z) z->seed = 0;
    if (z) barren(s, z, ECHILD);
    else if (any_ordered(s)) s->strays[s->n_strays++ % STRAYS] = pid;
}

bool seed_take(struct spawner *s, const struct request *q, const struct limits *limits, struct sprout *out) {
    struct zygote *z = any_ready(s);
    if (!z) return false;
    if (slot_limit(s, z->slot, limits) || !send_fds(z->seed_end, q->body, q->n, q->fds, q->n_fds)) {
        barren(s, z, errno);
        return false;
    }
    *out = (struct sprout){.pid = z->seed, .slot = z->slot, .status = z->seed_end};
    z->seed = 0;
    z->seed_end = -1;
    z->ready = false;
    z->busy = true;
    z->since = boottime_ns();
    return true;
}

/* One was killed on its way: the others may have been, too, and have not come to die yet. The next sandbox is made without them. */
void seeds_distrust(struct spawner *s) {
    for (unsigned i = 0; i < ZYGOTES; i++)
        if (s->zygotes[i].ready) barren(s, &s->zygotes[i], ECHILD);
}

/* The sandbox of a slot has ended: the slot is free, unless a zygote has it. */
bool zygote_keeps(struct spawner *s, uint32_t slot) {
    struct zygote *z = zygote_of(s, slot);
    if (z) z->busy = false;
    return z;
}

void zygotes_stop(struct spawner *s) {
    for (unsigned i = 0; i < ZYGOTES; i++) {
        struct zygote *z = &s->zygotes[i];
        if (!z->pid) continue;
        let_go(s, z);
    }
    for (int tries = 0; tries < 1000; tries++) { /* those let go earlier may still be on their way out */
        pid_t pid = waitpid(-1, NULL, WNOHANG | __WALL);
        if (pid < 0) return;
        if (!pid) usleep(1000);
    }
}
