/* The event loop: requests, set-up reports, deadlines, deaths. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "spawner.h"

#define LATE_NS 3000000000u /* for a seed that was given a sandbox to become its init */

uint64_t boottime_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Events name a pid, not a pointer: whatever was freed meanwhile is simply not found. */
void listen_to(struct spawner *s, int fd, enum source source, pid_t pid) {
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = (uint64_t)source | (uint64_t)pid << 8};
    if (epoll_ctl(s->epoll, EPOLL_CTL_ADD, fd, &e)) note("epoll", "", errno);
}

/* Closing alone is not enough: while a child holds a copy, epoll goes on telling of what we closed. */
void unwatch(const struct spawner *s, int fd) {
    epoll_ctl(s->epoll, EPOLL_CTL_DEL, fd, NULL);
    close(fd);
}

void rearm(struct spawner *s, uint64_t deadline) {
    struct itimerspec now;
    if (!deadline || timerfd_gettime(s->timer, &now)) return;
    uint64_t left = (uint64_t)now.it_value.tv_sec * 1000000000u + (uint64_t)now.it_value.tv_nsec;
    if (left && boottime_ns() + left <= deadline) return;
    struct itimerspec at = {.it_value = {.tv_sec = (time_t)(deadline / 1000000000u), .tv_nsec = (long)(deadline % 1000000000u)}};
    if (timerfd_settime(s->timer, TFD_TIMER_ABSTIME, &at, NULL)) note("timer", "", errno);
}

/* ---- ending ---- */

static void kill_sandbox(struct spawner *s, struct sandbox *sb) {
    sb->state = S_DYING;
    slot_hurry(s, sb->slot);
    if (sb->pidfd >= 0)
        syscall(SYS_pidfd_send_signal, sb->pidfd, SIGKILL, NULL, 0);
    else
        kill(sb->pid, SIGKILL); /* our child, not reaped yet: the pid is still its own */
    if (sb->frozen) slot_freeze(s, sb->slot, false); /* v1 keeps frozen processes from dying */
}

/* Init is dead; at level `container` so is everything below it, because the kernel ended its namespace first. */
static void buried(struct spawner *s, struct sandbox *sb, int status) {
    bool gone = s->config.level == LEVEL_CONTAINER || process_end_all(s, sb->slot);
    if (sb->create_seq && sb->failed)
        answer(s, sb->create_seq, sb->fail_errno, sb->fail_step, NULL, 0);
    else if (sb->create_seq)
        answer(s, sb->create_seq, ECANCELED, "destroyed while it was made", NULL, 0);
    else if (!sb->n_waiters && !s->stopping)
        tell_ended(s, sb, status);
    for (unsigned i = 0; i < sb->n_waiters; i++)
        answer(s, sb->waiters[i], gone ? 0 : EBUSY, "its processes do not die", NULL, 0);
    sb->n_waiters = 0;
    sb->create_seq = 0;
    sb->state = S_DYING;
    sb->lingers = !gone; /* its ids and cgroups stay its own until they are free */
    if (!gone) return;
    slot_hurry(s, sb->slot);
    slot_release(s, sb->slot, sb->frozen);
    table_remove(s, sb);
}

static void set_up(struct spawner *s, struct sandbox *sb);

static void reap(struct spawner *s) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | __WALL)) > 0;) {
        struct sandbox *sb = table_by_pid(s, pid);
        if (!sb) {
            child_ended(s, pid);
            continue;
        }
        if (sb->status >= 0) set_up(s, sb);
        buried(s, sb, status);
    }
}

static void kill_each(struct spawner *s, struct sandbox *sb, void *arg) {
    (void)arg;
    if (sb->lingers) {
        process_end_all(s, sb->slot);
        table_remove(s, sb);
        return;
    }
    if (sb->state != S_DYING) kill_sandbox(s, sb);
}

static void remove_parents(const struct spawner *s) {
    for (unsigned i = 0; i < s->n_groups; i++) {
        int up = openat(s->groups[i].dir, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (up >= 0) group_remove(up, s->groups[i].name);
    }
}

/* A durable spawner that has no owner and no sandbox has nothing left to hold: the next engine starts another. */
static void stop_if_done(struct spawner *s) {
    bool idle = s->config.durable && s->owned && s->owner < 0;
    if ((!s->stopping && !idle) || s->n_sandboxes) return;
    zygotes_stop(s);
    slots_remove_all(s);
    remove_parents(s);
    if (s->stop_seq) answer(s, s->stop_seq, 0, "", NULL, 0);
    _exit(0);
}

static void stop_all(struct spawner *s, uint32_t seq) {
    s->stopping = true;
    if (seq) s->stop_seq = seq;
    table_each(s, kill_each, NULL);
}

struct due {
    uint64_t now, next;
};

static bool is_due(struct due *due, uint64_t at) {
    if (at > due->now && (!due->next || at < due->next)) due->next = at;
    return at && at <= due->now;
}

static void end_if_due(struct spawner *s, struct sandbox *sb, void *arg) {
    struct due *due = arg;
    if (sb->state == S_DYING) return;
    if (is_due(due, sb->deadline)) {
        sb->expired = true;
        kill_sandbox(s, sb);
    } else if (is_due(due, sb->late_at)) {
        kill(sb->pid, SIGKILL); /* stopped from outside, say: as one that was killed, its sandbox is made without seeds */
        sb->late_at = 0;
    }
}

static void deadlines(struct spawner *s) {
    uint64_t ticks;
    if (read(s->timer, &ticks, sizeof ticks) < 0) return;
    struct due due = {.now = boottime_ns()};
    table_each(s, end_if_due, &due);
    rearm(s, due.next);
}

/* ---- making ---- */

/* A process that does all set-up itself. */
static int sprout_new(struct spawner *s, const struct plan *p, struct sprout *out, const char **step) {
    int pair[2];
    long slot = slot_reserve(s, step);
    if (slot < 0) return (int)-slot;
    *step = "limits";
    int err = slot_limit(s, (uint32_t)slot, &p->limits);
    if (!err && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) err = errno, *step = "socket pair";
    if (!err) {
        pid_t pid = clone_into(s, (uint32_t)slot, 0);
        if (!pid) child_direct(s, (uint32_t)slot, p, pair[1]);
        if (pid < 0) err = errno, *step = "clone", close(pair[0]);
        close(pair[1]);
        *out = (struct sprout){.pid = pid, .slot = (uint32_t)slot, .status = pair[0]};
    }
    if (err) slot_release(s, (uint32_t)slot, false);
    return err;
}

static void create(struct spawner *s, uint32_t seq, const struct plan *p, const struct request *q) {
    const char *step = "";
    struct sprout sprout;
    if (table_by_id(s, p->id)) return answer(s, seq, EEXIST, "this id exists", NULL, 0);
    bool seed = seed_take(s, q, &p->limits, &sprout);
    int err = seed ? 0 : sprout_new(s, p, &sprout, &step);
    if (err) return answer(s, seq, err, step, NULL, 0);
    struct sandbox *sb = table_add(s, p->id, sprout.pid);
    sb->slot = sprout.slot;
    sb->status = sprout.status;
    sb->create_seq = seq;
    sb->deadline = p->deadline;
    sb->late_at = seed ? boottime_ns() + LATE_NS : 0;
    rearm(s, sb->deadline);
    rearm(s, sb->late_at);
    if (seed) epoll_ctl(s->epoll, EPOLL_CTL_DEL, sb->status, NULL);
    listen_to(s, sb->status, FROM_STATUS, sb->pid);
}

static void answer_created(struct spawner *s, struct sandbox *sb) {
    uint8_t buf[64];
    struct writer w = writer_of(buf, sizeof buf);
    const struct slot *slot = slot_at(s, sb->slot);
    put_u32(&w, (uint32_t)sb->pid);
    put_u32(&w, sb->slot);
    put_u64(&w, slot->oom_base);
    put_u64(&w, slot->cpu_base);
    answer(s, sb->create_seq, 0, "", buf, w.len);
    sb->create_seq = 0;
}

/* The report pipe speaks (set-up failed) or ends (init runs). */
/* A process that is killed on its way closes the report just as one that became init does. It has given up its memory, and with
 * it its program, before its descriptors. */
static bool lives(const struct spawner *s, pid_t pid) {
    char path[32], exe[8];
    snprintf(path, sizeof path, "%d/exe", pid);
    return readlinkat(s->proc, path, exe, sizeof exe) >= 0 || errno == EACCES;
}

static void set_up(struct spawner *s, struct sandbox *sb) {
    uint8_t buf[96];
    ssize_t n = recv(sb->status, buf, sizeof buf, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    unwatch(s, sb->status);
    sb->status = -1;
    sb->late_at = 0;
    if (n == 0 && sb->state == S_DYING) return;
    if (n == 0 && lives(s, sb->pid)) {
        sb->state = S_RUNNING;
        answer_created(s, sb);
        return seeds_refill_soon(s);
    }
    struct reader r = reader_of(buf, n < 0 ? 0 : (size_t)n);
    sb->failed = true;
    sb->fail_errno = (int)get_u32(&r);
    struct span step = get_bytes(&r);
    snprintf(sb->fail_step, sizeof sb->fail_step, "%.*s", (int)step.n, (const char *)step.p);
    if (n <= 0) { /* before it had read its request, or after */
        sb->fail_errno = ESRCH;
        strcpy(sb->fail_step, "it was killed");
        seeds_distrust(s);
    }
    sb->state = S_DYING; /* the child is leaving; its slot is free once it is reaped */
}

/* ---- requests ---- */

static void hello(struct spawner *s, uint32_t seq, struct reader *r) {
    uint8_t buf[64];
    struct writer w = writer_of(buf, sizeof buf);
    if (get_u32(r) != SPAWNER_VERSION || !reader_done(r)) return answer(s, seq, EPROTO, "version", NULL, 0);
    put_u32(&w, SPAWNER_VERSION);
    put_u32(&w, (uint32_t)getpid());
    put_u32(&w, s->config.level);
    put_u32(&w, (uint32_t)s->oom_adj);
    answer(s, seq, 0, "", buf, w.len);
}

static void destroy(struct spawner *s, uint32_t seq, struct sandbox *sb) {
    if (!sb) return answer(s, seq, 0, "", NULL, 0);
    if (sb->n_waiters == WAITERS_MAX) return answer(s, seq, EBUSY, "too many wait for this one", NULL, 0);
    sb->waiters[sb->n_waiters++] = seq;
    if (sb->lingers) return buried(s, sb, 0);
    if (sb->state != S_DYING) kill_sandbox(s, sb);
}

static void freeze(struct spawner *s, uint32_t seq, struct sandbox *sb, bool frozen) {
    if (!sb || sb->state != S_RUNNING) return answer(s, seq, ENOENT, "not running", NULL, 0);
    int err = slot_freeze(s, sb->slot, frozen);
    if (!err) sb->frozen = frozen;
    answer(s, seq, err, "freezer", NULL, 0);
}

static void deadline(struct spawner *s, uint32_t seq, struct sandbox *sb, uint64_t at) {
    if (!sb || sb->state == S_DYING) return answer(s, seq, ENOENT, "not running", NULL, 0);
    sb->deadline = at;
    rearm(s, at);
    answer(s, seq, 0, "", NULL, 0);
}

static void list_bucket(struct spawner *s, uint32_t seq, uint32_t bucket) {
    uint8_t buf[MESSAGE_MAX - 64];
    struct writer w = writer_of(buf, sizeof buf);
    uint32_t count = 0;
    put_u32(&w, 0);
    put_u32(&w, 0);
    for (; s->by_id && bucket < s->n_buckets && w.len < sizeof buf / 2; bucket++)
        for (const struct sandbox *sb = s->by_id[bucket]; sb; sb = sb->next_id) {
            if (sb->state != S_RUNNING) continue;
            const struct slot *slot = slot_at(s, sb->slot);
            put_bytes(&w, sb->id, strlen(sb->id));
            put_u32(&w, (uint32_t)sb->pid);
            put_u32(&w, sb->slot);
            put_u64(&w, slot->oom_base);
            put_u64(&w, slot->cpu_base);
            put_u64(&w, sb->deadline);
            put_u8(&w, sb->frozen);
            count++;
        }
    patch_u32(&w, 0, bucket < s->n_buckets ? bucket : 0);
    patch_u32(&w, 4, count);
    answer(s, seq, 0, "", buf, w.len);
}

static bool tree_name(struct span name, char *text, size_t size) {
    if (name.n >= size || span_has_nul(name) || memchr(name.p, '/', name.n) || (name.n && name.p[0] == '.')) return false;
    memcpy(text, name.p, name.n);
    text[name.n] = 0;
    return true;
}

static void tree(struct spawner *s, uint32_t seq, struct span name, const struct request *q) {
    char text[128];
    bool plain = name.n && tree_name(name, text, sizeof text);
    if (!plain || q->n_fds != 1 || s->config.level != LEVEL_CONTAINER) return answer(s, seq, EINVAL, "tree", NULL, 0);
    answer(s, seq, world_attach(text, q->fds[0]), "attach tree", NULL, 0);
}

static void untree(struct spawner *s, uint32_t seq, struct reader *r) {
    char text[128];
    struct span name = get_bytes(r);
    if (!reader_done(r)) return answer(s, seq, EPROTO, "malformed", NULL, 0);
    bool plain = tree_name(name, text, sizeof text);
    if (!plain || s->config.level != LEVEL_CONTAINER) return answer(s, seq, EINVAL, "untree", NULL, 0);
    answer(s, seq, world_detach(text), "detach tree", NULL, 0);
}

static void one_id(struct spawner *s, uint32_t op, uint32_t seq, struct reader *r) {
    struct span id = get_bytes(r);
    uint64_t value = op == OP_DESTROY ? 0 : get_u64(r);
    if (!reader_done(r)) return answer(s, seq, EPROTO, "malformed", NULL, 0);
    struct sandbox *sb = table_by_id(s, id);
    if (op == OP_DESTROY) return destroy(s, seq, sb);
    if (op == OP_FREEZE) return freeze(s, seq, sb, value != 0);
    deadline(s, seq, sb, value);
}

static void request(struct spawner *s, struct reader *r, const struct request *q) {
    uint32_t op = get_u32(r), seq = get_u32(r);
    struct plan p;
    memset(&p, 0, sizeof p);
    if (r->bad || !seq) return answer(s, seq, EPROTO, "malformed", NULL, 0);
    switch (op) {
    case OP_HELLO:
        return hello(s, seq, r);
    case OP_TREE:
        return tree(s, seq, get_bytes(r), q);
    case OP_UNTREE:
        return untree(s, seq, r);
    case OP_CREATE:
        if (s->stopping) return answer(s, seq, ESHUTDOWN, "stopping", NULL, 0);
        if (!parse_create(r, &p, q->fds, q->n_fds)) return answer(s, seq, EPROTO, "malformed", NULL, 0);
        return create(s, seq, &p, q);
    case OP_DESTROY:
    case OP_FREEZE:
    case OP_DEADLINE:
        return one_id(s, op, seq, r);
    case OP_LIST:
        return list_bucket(s, seq, get_u32(r));
    case OP_SHUTDOWN:
        return stop_all(s, seq);
    default:
        return answer(s, seq, EPROTO, "unknown request", NULL, 0);
    }
}

/* ---- the owner ---- */

/* What the old owner waits for must not be answered to the next, whose numbers are others. What it was having made
 * nobody knows of any more. */
static void forget_owner(struct spawner *s, struct sandbox *sb, void *arg) {
    (void)arg;
    sb->n_waiters = 0;
    sb->create_seq = 0;
    if (sb->state == S_CREATING) kill_sandbox(s, sb);
}

static void drop_owner(struct spawner *s) {
    if (s->owner < 0) return;
    unwatch(s, s->owner);
    s->owner = -1;
    table_each(s, forget_owner, NULL);
    s->stop_seq = 0;
}

static void accept_owner(struct spawner *s) {
    struct ucred who;
    socklen_t n = sizeof who;
    int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) || (who.uid != geteuid() && who.uid != 0)) {
        close(fd);
        return;
    }
    drop_owner(s); /* a newer engine replaces the older: it holds the lock of the state directory */
    s->owner = fd;
    s->owned = true;
    listen_to(s, fd, FROM_OWNER, 0);
}

static void from_owner(struct spawner *s) {
    static uint8_t buf[MESSAGE_MAX];
    int fds[FDS_MAX];
    unsigned n_fds = FDS_MAX;
    ssize_t n = receive_fds(s->owner, buf, sizeof buf, fds, &n_fds, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0 && errno == EMSGSIZE) return answer(s, 0, EPROTO, "malformed", NULL, 0);
    if (n <= 0) return drop_owner(s);
    struct reader r = reader_of(buf, (size_t)n);
    struct request q = {.body = buf + 8, .n = (size_t)n - (n < 8 ? (size_t)n : 8), .fds = fds, .n_fds = n_fds};
    request(s, &r, &q);
    for (unsigned i = 0; i < n_fds; i++) close(fds[i]);
}

static void from_signals(struct spawner *s) {
    struct signalfd_siginfo info;
    while (read(s->signals, &info, sizeof info) == sizeof info)
        if (info.ssi_signo == SIGTERM) {
            if (s->config.durable) _exit(0); /* sandboxes live on; the next spawner adopts them */
            stop_all(s, 0);
        }
    reap(s);
}

static void handle(struct spawner *s, enum source source, pid_t pid) {
    struct sandbox *sb = pid ? table_by_pid(s, pid) : NULL;
    switch (source) {
    case FROM_LISTENER: return accept_owner(s);
    case FROM_LIFELINE:
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, s->lifeline, NULL);
        return stop_all(s, 0);
    case FROM_OWNER:
        if (s->owner >= 0) from_owner(s);
        return;
    case FROM_TIMER: return deadlines(s);
    case FROM_SIGNALS: return from_signals(s);
    case FROM_STATUS:
        if (sb && sb->status >= 0) set_up(s, sb);
        return;
    case FROM_PIDFD:
        if (sb) buried(s, sb, -1); /* not our child: only that it ended is known */
        return;
    case FROM_ZYGOTE:
        zygotes_news(s, pid);
    }
}

void watch_pidfd(struct spawner *s, const struct sandbox *sb) { listen_to(s, sb->pidfd, FROM_PIDFD, sb->pid); }

void loop_run(struct spawner *s) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    s->pid = getpid();
    s->epoll = epoll_create1(EPOLL_CLOEXEC);
    s->timer = timerfd_create(CLOCK_BOOTTIME, TFD_CLOEXEC | TFD_NONBLOCK);
    s->signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (sigprocmask(SIG_BLOCK, &mask, NULL) || s->epoll < 0 || s->timer < 0 || s->signals < 0) die("event loop");
    listen_to(s, s->listener, FROM_LISTENER, 0);
    listen_to(s, s->timer, FROM_TIMER, 0);
    listen_to(s, s->signals, FROM_SIGNALS, 0);
    if (!s->config.durable) listen_to(s, s->lifeline, FROM_LIFELINE, 0);
    adopt_running(s);
    seeds_refill(s);
    for (;;) {
        struct epoll_event events[32];
        int n = epoll_wait(s->epoll, events, 32, seeds_wait_ms(s));
        for (int i = 0; i < n; i++)
            handle(s, (enum source)(events[i].data.u64 & 0xff), (pid_t)(events[i].data.u64 >> 8));
        if (!seeds_wait_ms(s)) seeds_refill(s);
        stop_if_done(s);
    }
}
