/* The life of execs: started, attached, signalled, ended, forgotten. */
#include <errno.h>
#include <linux/sockios.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "exec.h"
#include "ids.h"

#define LATEST 5000000ull            /* ns that STARTED may be held back */
#define OBEY_WITHIN 10000000000ull   /* ns for a monitor to kill its tree, or to say that it cannot */

static struct exec *actives, *all;
static uint32_t kept, running;

uint32_t execs_kept(void) { return kept; }
uint32_t execs_running(void) { return running; }

void execs_carried(struct tree_usage *sum) {
    for (const struct exec *e = all; e; e = e->all_next)
        if (e->control.fd >= 0)
            usage_join(sum, &e->monitor.before);
}

static struct exec *find(struct span id) {
    struct exec *e = all;
    while (e && !(e->id_n == id.n && memcmp(e->id, id.p, id.n) == 0))
        e = e->all_next;
    return e;
}

static void activate(struct exec *e) {
    if (e->active)
        return;
    e->active = true;
    e->prev = NULL;
    e->next = actives;
    if (actives)
        actives->prev = e;
    actives = e;
}

static void deactivate(struct exec *e) {
    if (!e->active)
        return;
    e->active = false;
    if (e->prev)
        e->prev->next = e->next;
    else
        actives = e->next;
    if (e->next)
        e->next->prev = e->prev;
}

static struct exec *exec_new(const struct request *q) {
    struct exec *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    memcpy(e->id, q->id.p, q->id.n);
    e->id_n = (uint8_t)q->id.n;
    e->pty = q->bits & EXEC_PTY;
    e->late = exec_late(q);
    e->announce_by = e->obeyed_by = NEVER;
    e->control.fd = e->in.io.fd = e->s[0].io.fd = e->s[1].io.fd = e->s[0].writer = e->s[1].writer = -1;
    e->s[0].ring.keep = e->s[1].ring.keep = (size_t)q->keep;
    e->s[1].done = e->pty;
    e->started = now_ns();
    e->deadline = q->a ? e->started + q->a * 1000000u : NEVER;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    e->started_real = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    return e;
}

static void exec_link(struct exec *e) {
    e->all_next = all;
    if (all)
        all->all_prev = e;
    all = e;
    kept++;
    running++;
    activate(e);
}

static struct exec *releases;

static int order(const struct exec *e, uint8_t what, uint8_t signo, bool group) {
    const uint8_t message[ORDER_SIZE] = {what, signo, group};
    size_t n = what == ORDER_SIGNAL ? sizeof message : 1;
    return send(e->control.fd, message, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? errno : 0;
}

/* Signals fill at most half of what a monitor may leave unread: for the orders that end something there is always room. */
static bool takes_signals(const struct exec *e) {
    int unread = 0, room = 0;
    socklen_t size = sizeof room;
    return ioctl(e->control.fd, SIOCOUTQ, &unread) == 0 &&
           getsockopt(e->control.fd, SOL_SOCKET, SO_SNDBUF, &room, &size) == 0 && unread < room / 2;
}

static void release_now(struct exec *e) {
    e->releasing = false;
    if (e->control.fd < 0)
        return;
    if (!e->waits) {
        order(e, ORDER_GO, 0, false);
        io_close(&e->control);
        return;
    }
    io_leave(&e->control);
    usage_join(&e->monitor.before, &e->usage);
    spare_offer(&e->monitor);
}

/* Later, so that the monitor's exit does not compete with the EXIT frame for the processor. */
static void release(struct exec *e) {
    if (e->releasing)
        return;
    e->releasing = true;
    e->release_next = releases;
    releases = e;
}

void execs_release(void) {
    while (releases) {
        struct exec *e = releases;
        releases = e->release_next;
        release_now(e);
    }
}

static void exec_free(struct exec *e) {
    if (e->releasing)
        execs_release();
    deactivate(e);
    if (e->all_prev)
        e->all_prev->all_next = e->all_next;
    else
        all = e->all_next;
    if (e->all_next)
        e->all_next->all_prev = e->all_prev;
    kept--;
    io_close(&e->control);
    streams_free(e);
    free(e);
}

static void send_started(struct exec *e) {
    uint8_t buf[20];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, (uint32_t)e->pid);
    put_u64(&w, e->s[0].sent);
    put_u64(&w, e->s[1].sent);
    send_frame(K_STARTED, 0, e->channel->id, buf, w.len);
    e->announced = true;
    e->announce_by = NEVER;
}

void exec_announce(struct exec *e) {
    if (e->channel && !e->announced)
        send_started(e);
}

/* What refuses an EXEC before anything is made. */
static bool refused(const struct request *q) {
    if (ids_seen(q->id))
        send_error(q->channel, EEXIST, CODE_ERRNO, "this exec id was used before");
    else if (kept >= KEPT_LIMIT || running >= RUNNING_LIMIT)
        send_error(q->channel, EAGAIN, CODE_BOUND, "too many execs: 1024 may run, 2048 may be kept; FORGET some");
    else if (sv.killing)
        send_error(q->channel, EAGAIN, CODE_ERRNO, "all processes of the sandbox are being ended");
    else if (!sv.privileged && (q->uid != sv.uid || q->gid != sv.gid))
        send_error(q->channel, EPERM, CODE_ERRNO, "this sandbox has one user only");
    else
        return false;
    return true;
}

void exec_start(const struct request *q) {
    if (refused(q))
        return;
    struct exec *e = exec_new(q);
    struct channel *c = e ? channel_open(q->channel) : NULL;
    int err = !e ? ENOMEM : !c ? EMFILE : !ids_add(q->id) ? ENOMEM : exec_launch(e, q);
    if (err) {
        /* The id counts as used although nothing ran: refusing it again is the safe side. */
        if (c)
            channel_free(c);
        if (c || !e) {
            send_error(q->channel, err, CODE_ERRNO, "the command could not be started");
        }
        free(e);
        return;
    }
    c->exec = e;
    c->credit = q->credit;
    e->channel = c;
    exec_link(e);
}

static uint64_t clamp_offset(const struct stream *s, uint64_t asked) {
    uint64_t oldest = s->total - s->ring.len;
    return asked < oldest ? oldest : asked;
}

void exec_detach(struct exec *e) {
    if (!e->channel)
        return;
    channel_free(e->channel);
    e->channel = NULL;
    e->announce_by = NEVER;
    if (e->state == ENDED)
        deactivate(e);
}

static bool no_exec(const struct request *q, struct exec *e) {
    if (!e)
        send_error(q->channel, ESRCH, CODE_UNKNOWN, "no exec has this id");
    return !e;
}

void exec_attach(const struct request *q) {
    struct exec *e = find(q->id);
    if (no_exec(q, e))
        return;
    if (q->a > e->s[0].total || q->b > e->s[1].total) {
        send_error(q->channel, EINVAL, CODE_RANGE, "an offset lies beyond the output");
        return;
    }
    if (e->in.len > 3 * WINDOW) {
        send_error(q->channel, EAGAIN, CODE_BOUND, "too much standard input waits for the command");
        return;
    }
    struct channel *c = channel_open(q->channel);
    if (!c)
        return;
    if (e->channel) {
        send_error(e->channel->id, ECONNRESET, CODE_ERRNO, "another channel was attached");
        exec_detach(e);
    }
    c->exec = e;
    c->credit = q->credit;
    e->channel = c;
    e->s[0].sent = clamp_offset(&e->s[0], q->a);
    e->s[1].sent = clamp_offset(&e->s[1], q->b);
    e->announced = e->late = false;
    activate(e);
    if (e->pid || e->state != RUNNING)
        send_started(e);
}

static void order_kill(struct exec *e) {
    order(e, ORDER_KILL, 0, false);
    if (e->obeyed_by == NEVER)
        e->obeyed_by = now_ns() + OBEY_WITHIN;
}

/* Asks the monitor, or where it is gone ends everything. */
static void ask_kill(struct exec *e, uint8_t reason) {
    if (!e->kill_reason)
        e->kill_reason = reason;
    e->deadline = NEVER;
    if (e->lost)
        kill_everything();
    else
        order_kill(e);
}

static int deliver(struct exec *e, const struct request *q) {
    if (e->state != RUNNING)
        return ESRCH;
    if (q->bits == 2) {
        ask_kill(e, 2);
        return 0;
    }
    if (e->kill_reason || e->reaped || sv.killing)
        return 0; /* it is being killed; its pid may not be its own any more */
    if (e->lost) /* it is init's own child now */
        return kill(q->bits == 1 ? -e->pid : e->pid, (int)q->number) == 0 ? 0 : errno;
    if (!takes_signals(e))
        return EAGAIN;
    return order(e, ORDER_SIGNAL, (uint8_t)q->number, q->bits == 1) == EAGAIN ? EAGAIN : 0;
}

static void answer(uint32_t channel, int err, const char *message) {
    if (err)
        send_error(channel, err, CODE_ERRNO, message);
    else
        send_ok(channel);
}

void exec_signal(const struct request *q) {
    struct exec *e = find(q->id);
    if (no_exec(q, e))
        return;
    int err = deliver(e, q);
    if (err == EAGAIN)
        send_error(q->channel, err, CODE_BOUND, "too many signals wait for this command");
    else
        answer(q->channel, err, "the signal was not delivered");
}

void exec_winsize(const struct request *q) {
    struct exec *e = find(q->id);
    if (no_exec(q, e))
        return;
    struct winsize size = {.ws_row = q->rows, .ws_col = q->cols};
    int err = !e->pty ? ENOTTY : e->s[0].io.fd < 0 || e->state == ENDED ? ESRCH : 0;
    if (!err && ioctl(e->s[0].io.fd, TIOCSWINSZ, &size) != 0)
        err = errno;
    answer(q->channel, err, "the exec has no terminal");
}

void exec_forget(const struct request *q) {
    struct exec *e = find(q->id);
    if (no_exec(q, e))
        return;
    if (e->state == RUNNING) {
        send_error(q->channel, EBUSY, CODE_ERRNO, "the command still runs");
        return;
    }
    if (e->channel) {
        send_error(e->channel->id, ECONNRESET, CODE_ERRNO, "the exec was forgotten");
        exec_detach(e);
    }
    drain_adopt(&e->s[0].io);
    drain_adopt(&e->s[1].io);
    exec_free(e);
    send_ok(q->channel);
}

static void put_exec(struct writer *w, const struct exec *e) {
    put_bytes(w, e->id, e->id_n);
    put_u32(w, (uint32_t)e->pid);
    put_u8(w, e->state == RUNNING ? 0 : 1);
    put_u8(w, e->how);
    put_u32(w, (uint32_t)e->code);
    put_u8(w, e->reason);
    put_u64(w, (uint64_t)e->started_real);
    put_u64(w, e->s[0].total);
    put_u64(w, e->s[1].total);
}

/* KEPT_LIMIT rows of at most 103 bytes fit in one frame. */
void exec_list(uint32_t channel) {
    struct writer w = writer_of(sv.scratch, FRAME_MAX);
    uint32_t n = 0;
    put_u32(&w, 0);
    for (const struct exec *e = all; e; e = e->all_next, n++)
        put_exec(&w, e);
    patch_u32(&w, 0, n);
    send_frame(K_EXECS, 0, channel, w.p, w.len);
    sv.busy = true;
}

static uint64_t later(uint64_t t, uint64_t ns) {
    return t == NEVER ? NEVER : t > NEVER - 1 - ns ? NEVER - 1 : t + ns;
}

void exec_shift(uint64_t ms) {
    uint64_t ns = ms > TIMEOUT_LIMIT ? TIMEOUT_LIMIT * 1000000u : ms * 1000000u;
    for (struct exec *e = actives; e; e = e->next) {
        e->deadline = later(e->deadline, ns);
        e->obeyed_by = later(e->obeyed_by, ns);
    }
}

bool exec_input(struct exec *e, struct span data, bool end) { return input_add(e, data, end); }

/* The leader is dead (and its whole tree, when it was killed). */
static void leader_ended(struct exec *e, uint8_t how, int32_t code, uint8_t reason) {
    if (e->state != RUNNING)
        return;
    exec_announce(e);
    e->how = how;
    e->code = code;
    e->reason = reason;
    e->wall = now_ns() - e->started;
    e->deadline = e->obeyed_by = NEVER;
    e->state = DRAINING;
    running--;
    streams_leader_ended(e);
    if (!e->pty)
        input_close(e);
    release(e);
}

static void ended_by_status(struct exec *e, int status, uint8_t reason) {
    if (WIFSIGNALED(status))
        leader_ended(e, 1, WTERMSIG(status), reason);
    else
        leader_ended(e, 0, WEXITSTATUS(status), reason);
}

static void started(struct exec *e, pid_t pid) {
    e->pid = pid;
    if (e->late)
        e->announce_by = now_ns() + LATEST;
    else
        exec_announce(e);
}

static void ended(struct exec *e, const struct report *r, uint8_t reason) {
    if (e->state != RUNNING)
        return;
    e->waits = r->what == REPORT_DONE;
    e->pid = r->pid;
    e->usage = r->usage;
    ended_by_status(e, r->value, reason);
}

static void handle(struct exec *e, const struct report *r) {
    switch (r->what) {
    case REPORT_STARTED: started(e, r->pid); break;
    case REPORT_FAILED:
        e->waits = !e->kill_reason; /* a kill that is on its way would meet the next command */
        leader_ended(e, 2, r->value, 0);
        break;
    case REPORT_ESCALATE: kill_everything(); break;
    case REPORT_DONE:
    case REPORT_ENDED:
        if (!e->kill_reason) /* else the kill is on its way: the monitor ends the rest of the tree and reports again */
            ended(e, r, 0);
        break;
    case REPORT_KILLED: ended(e, r, e->kill_reason ? e->kill_reason : 2); break;
    default: break;
    }
}

/* The monitor is gone without a last report: somebody killed it. */
static void lose(struct exec *e) {
    if (e->state != RUNNING) { /* after its last report it may go */
        io_close(&e->control);
        return;
    }
    e->lost = true;
    e->monitor.before = (struct tree_usage){0}; /* init reaps what it has used */
    io_close(&e->control);
    if (e->kill_reason || !e->pid)
        kill_everything();
}

static void read_reports(struct exec *e) {
    while (e->control.fd >= 0 && e->control.in) {
        struct report r;
        ssize_t n = recv(e->control.fd, &r, sizeof r, MSG_DONTWAIT);
        e->control.in = e->control.hup; /* level-triggered: the next report is a new event */
        if (n == (ssize_t)sizeof r)
            handle(e, &r);
        else if (n < 0 && errno == EAGAIN)
            e->control.in = false;
        else if (n == 0 || (errno != EINTR && errno != ECONNRESET)) /* it left an order unread: its last report comes next */
            lose(e);
    }
}

void execs_monitors(void) {
    for (struct exec *e = actives, *next; e; e = next) {
        next = e->next;
        read_reports(e);
    }
}

/* A leader that init itself reaps has lost its monitor. While everything is being ended its status waits for the end. */
void execs_reaped(pid_t pid, int status, const struct rusage *ru) {
    for (struct exec *e = actives; e; e = e->next) {
        if (e->state != RUNNING || e->pid != pid)
            continue;
        e->control.in = true;
        read_reports(e);
        if (e->state != RUNNING)
            return;
        usage_add(&e->usage, ru);
        e->status = status;
        e->reaped = true;
        if (!sv.killing)
            ended_by_status(e, status, 0);
        return;
    }
}

void execs_all_dead(void) {
    for (struct exec *e = actives; e; e = e->next) {
        read_reports(e);
        if (e->state == RUNNING)
            ended_by_status(e, e->reaped ? e->status : SIGKILL, 3);
    }
}

void execs_timers(uint64_t now) {
    for (struct exec *e = actives; e; e = e->next) {
        if (e->announce_by <= now)
            exec_announce(e);
        if (e->state == RUNNING && e->deadline <= now)
            ask_kill(e, 1);
        if (e->obeyed_by <= now) { /* the monitor was stopped: only the sandbox's root can */
            e->obeyed_by = NEVER;
            kill_everything();
        }
    }
}

uint64_t execs_next_timer(void) {
    uint64_t next = NEVER;
    for (struct exec *e = actives; e; e = e->next) {
        if (e->state == RUNNING && e->deadline < next)
            next = e->deadline;
        if (e->obeyed_by < next)
            next = e->obeyed_by;
        if (e->announce_by < next)
            next = e->announce_by;
        if (e->state == DRAINING && e->pty && e->grace < next && !e->s[0].done)
            next = e->grace;
    }
    return next;
}

static void send_exit(struct exec *e) {
    uint8_t buf[64];
    struct writer w = writer_of(buf, sizeof buf);
    put_u8(&w, e->how);
    put_u32(&w, (uint32_t)e->code);
    put_u8(&w, e->reason);
    put_u64(&w, e->s[0].total);
    put_u64(&w, e->s[1].total);
    put_u64(&w, e->usage.user_us);
    put_u64(&w, e->usage.system_us);
    put_u64(&w, e->usage.maxrss_kib);
    put_u64(&w, e->wall);
    send_frame(K_EXIT, 0, e->channel->id, buf, w.len);
}

static void finish(struct exec *e) {
    if (e->state == DRAINING) {
        e->state = ENDED;
        drain_adopt(&e->s[0].io);
        drain_adopt(&e->s[1].io);
        input_close(e);
    }
    if (e->channel) {
        streams_send_ends(e);
        send_exit(e);
        exec_detach(e);
    }
    deactivate(e);
}

bool execs_pump(void) {
    bool more = false;
    for (struct exec *e = actives, *next; e; e = next) {
        next = e->next;
        more |= streams_pump(e);
        input_pump(e);
        if (e->state != RUNNING && streams_done(e))
            finish(e);
    }
    more |= drains_pump();
    return more;
}
