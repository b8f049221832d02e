/* Output of commands: from pipe or terminal to the ring and the channel; input the other way. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "exec.h"

#define PIPE_DEFAULT 65536
#define PIPE_LARGE (512 << 10)
#define TERMINAL_GRACE 200000000ull  /* ns that others may hold a terminal open after the command has ended */
#define INPUT_LIMIT (4u * WINDOW)

/* Pipes that background processes still hold: read and thrown away, so that they do not die of SIGPIPE. */
struct drain {
    struct drain *next;
    struct io io;
};
static struct drain *drains;         /* oldest first */
static uint32_t drain_count;

static void drain_free(struct drain **at) {
    struct drain *d = *at;
    *at = d->next;
    io_close(&d->io);
    free(d);
    drain_count--;
}

void drain_oldest(void) {
    if (drains)
        drain_free(&drains);
}

/* Nothing is in it, and nobody is left who could write. */
static bool is_over(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1 && !(p.revents & POLLIN);
}

void drain_adopt(struct io *io) {
    struct drain *d = io->fd >= 0 && !is_over(io->fd) ? malloc(sizeof *d) : NULL;
    if (!d) {
        io_close(io);
        return;
    }
    io_move(&d->io, io);
    d->next = NULL;
    struct drain **at = &drains;
    while (*at)
        at = &(*at)->next;
    *at = d;
    if (++drain_count > DRAIN_LIMIT)
        drain_oldest();
}

bool drains_pump(void) {
    bool more = false;
    for (struct drain **at = &drains; *at;) {
        struct drain *d = *at;
        ssize_t n = d->io.in ? read(d->io.fd, sv.scratch, PIPE_DEFAULT) : -2;
        if (n == 0 || (n == -1 && errno != EAGAIN && errno != EINTR)) {
            drain_free(at);
            continue;
        }
        if (n == -1 && errno == EAGAIN)
            d->io.in = false;
        more |= d->io.in;
        at = &d->next;
    }
    return more;
}

static uint8_t number_of(const struct exec *e, const struct stream *s) { return s == &e->s[0] ? 1 : 2; }

/* Sends what the ring holds of bytes that the channel has not had. True: something was sent. */
static bool send_kept(struct exec *e, struct stream *s) {
    uint64_t oldest = s->total - s->ring.len;
    if (s->sent < oldest)
        s->sent = oldest;
    const uint8_t *p = NULL;
    size_t n = ring_peek(&s->ring, (size_t)(s->total - s->sent), &p);
    if (n > CHUNK)
        n = CHUNK;
    if (n > e->channel->credit)
        n = (size_t)e->channel->credit;
    if (n == 0)
        return false;
    exec_announce(e);
    send_data(e->channel->id, number_of(e, s), &s->sent, p, n);
    e->channel->credit -= n;
    s->sent += n;
    return true;
}

/* The ends of both streams go out together, with EXIT: a wake-up less for each side. */
void streams_send_ends(struct exec *e) {
    for (int i = 0; i < (e->pty ? 1 : 2); i++) {
        const struct stream *s = &e->s[i];
        send_data(e->channel->id, number_of(e, s) | FLAG_END, &s->sent, NULL, 0);
    }
}

static void enlarge(struct stream *s) {
    s->enlarged = true;
    fcntl(s->io.fd, F_SETPIPE_SZ, PIPE_LARGE);
}

static size_t read_limit(const struct exec *e, const struct stream *s) {
    size_t n = CHUNK;
    if (e->channel && e->channel->credit < n)
        n = (size_t)e->channel->credit;
    if (e->state != RUNNING && !e->pty && s->remain < n)
        n = (size_t)s->remain;
    return n;
}

static void took(struct exec *e, struct stream *s, size_t n) {
    if (e->state != RUNNING && !e->pty)
        s->remain -= n;
    ring_add(&s->ring, sv.scratch, n);
    uint64_t at = s->total;
    s->total += n;
    if (e->channel) {
        exec_announce(e);
        send_data(e->channel->id, number_of(e, s), &at, sv.scratch, n);
        e->channel->credit -= n;
        s->sent = s->total;
    }
    if (n >= PIPE_DEFAULT) {
        sv.busy = true;
        if (!s->enlarged && !e->pty)
            enlarge(s);
    }
}

static bool stream_over(const struct exec *e, const struct stream *s) {
    return e->state != RUNNING && (e->pty ? now_ns() >= e->grace : s->remain == 0);
}

/* At most one chunk. True: it could go on at once. */
static bool stream_pump(struct exec *e, struct stream *s) {
    if (e->channel && !conn_can_send())
        return false;
    if (e->channel && s->sent < s->total)
        return send_kept(e, s);
    if (!s->done && stream_over(e, s))
        s->done = true;
    if (s->done)
        return false;
    size_t n = s->io.in ? read_limit(e, s) : 0;
    if (n == 0)
        return false;
    ssize_t got = read(s->io.fd, sv.scratch, n);
    if (got > 0) {
        took(e, s, (size_t)got);
        return true;
    }
    if (got < 0 && errno == EINTR)
        return true;
    s->io.in = false;
    if (got < 0 && errno == EAGAIN) {
        s->done = e->state != RUNNING && !e->pty;
        return s->done;
    }
    if (e->pty && e->state == RUNNING)
        return false; /* EIO: nobody holds the terminal now, but it can be opened again, and closing would hang up */
    s->done = true;
    io_close(&s->io);
    return true;
}

bool streams_pump(struct exec *e) {
    if (e->state == RUNNING && !e->pid)
        return false; /* STARTED comes first */
    bool more = stream_pump(e, &e->s[0]);
    more |= stream_pump(e, &e->s[1]);
    return more;
}

bool streams_done(const struct exec *e) {
    for (int i = 0; i < 2; i++) {
        const struct stream *s = &e->s[i];
        if (!s->done || (e->channel && s->sent != s->total))
            return false;
    }
    return true;
}

static void close_writer(struct stream *s) {
    if (s->writer >= 0)
        close(s->writer);
    s->writer = -1;
}

/* From now on only what is in the pipes belongs to the command. */
void streams_leader_ended(struct exec *e) {
    e->grace = now_ns() + TERMINAL_GRACE;
    for (int i = 0; i < 2; i++) {
        struct stream *s = &e->s[i];
        int n = 0;
        close_writer(s);
        if (s->io.fd >= 0 && ioctl(s->io.fd, FIONREAD, &n) != 0)
            n = 0;
        s->remain = n > 0 ? (uint64_t)n : 0;
        s->io.in = s->io.fd >= 0;
    }
}

void streams_free(struct exec *e) {
    for (int i = 0; i < 2; i++) {
        close_writer(&e->s[i]);
        io_close(&e->s[i].io);
        ring_free(&e->s[i].ring);
    }
    input_close(e);
}

void input_close(struct exec *e) {
    if (!e->pty)
        io_close(&e->in.io);
    free(e->in.buf);
    e->in.buf = NULL;
    e->in.off = e->in.len = e->in.cap = 0;
}

static int input_fd(const struct exec *e) { return e->pty ? e->s[0].io.fd : e->in.io.fd; }

static void give_back(struct exec *e, size_t n) {
    if (!e->channel)
        return;
    size_t missing = WINDOW - e->channel->window; /* bytes of an earlier channel are not this one's */
    if (n > missing)
        n = missing;
    if (n == 0)
        return;
    exec_announce(e);
    uint8_t buf[4];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, (uint32_t)n);
    send_frame(K_CREDIT, 0, e->channel->id, buf, 4);
    e->channel->window += (uint32_t)n;
}

static void input_end(struct exec *e) {
    struct termios t;
    int fd = input_fd(e);
    if (e->pty && fd >= 0 && tcgetattr(fd, &t) == 0 && (t.c_lflag & ICANON)) {
        ssize_t ignored = write(fd, &t.c_cc[VEOF], 1);
        (void)ignored;
    }
    input_close(e);
}

/* Writes what waits, as far as the command takes it. */
void input_pump(struct exec *e) {
    struct input *in = &e->in;
    struct io *io = e->pty ? &e->s[0].io : &in->io;
    size_t written = 0;
    while (in->len && io->fd >= 0 && io->out) {
        ssize_t n = write(io->fd, in->buf + in->off, in->len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            io->out = false;
            break;
        }
        size_t used = n < 0 ? in->len : (size_t)n; /* EPIPE: nobody will read it */
        in->off += used;
        in->len -= used;
        written += used;
    }
    if (in->len && io->fd < 0) {
        written += in->len;
        in->len = 0;
    }
    give_back(e, written);
    if (in->len == 0 && in->buf) {
        free(in->buf);
        in->buf = NULL;
        in->off = in->cap = 0;
    }
    if (in->len == 0 && in->end) {
        in->end = false;
        input_end(e);
    }
}

static bool input_room(struct input *in, size_t n) {
    if (in->off && in->off + in->len + n > in->cap) {
        memmove(in->buf, in->buf + in->off, in->len);
        in->off = 0;
    }
    if (in->len + n <= in->cap)
        return true;
    size_t cap = in->cap ? in->cap : 4096;
    while (cap < in->len + n)
        cap *= 2;
    uint8_t *grown = realloc(in->buf, cap);
    if (!grown)
        return false;
    in->buf = grown;
    in->cap = cap;
    return true;
}

/* False: the connection broke a bound and is dropped. */
bool input_add(struct exec *e, struct span data, bool end) {
    struct input *in = &e->in;
    if (in->end)
        return true; /* after the end: ignored */
    if (in->len + data.n > INPUT_LIMIT || (data.n && !input_room(in, data.n)))
        return false;
    if (data.n)
        memcpy(in->buf + in->off + in->len, data.p, data.n);
    in->len += data.n;
    in->end = end;
    input_pump(e);
    return true;
}
