/* The engine's connection: frames in, frames out, channels. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "init.h"

#define BUCKETS 64u
#define COPY_BELOW 8192u             /* larger payloads are written from where they are */
#define READS_PER_TURN 64
#define OUT_LOW 65536u               /* sources read while no more than this waits to be sent */

static struct io conn = {.fd = -1};
static uint8_t *in_buf;              /* SCRATCH bytes: one whole frame fits */
static size_t in_len;
static uint8_t *out_buf;
static size_t out_off, out_len, out_cap;
static struct channel *table[BUCKETS];
static uint32_t channels;
static bool stalled;                 /* frames wait in in_buf because the queue was long */
static bool out_watched;             /* EPOLLOUT is asked for only while the socket is full: each costs a wake-up */
static bool broken;                  /* dropped at the next safe moment */

struct io *conn_io(void) { return &conn; }

bool conn_can_send(void) {
    bool can = conn.fd >= 0 && !broken && conn.out && out_len <= OUT_LOW;
    sv.blocked |= !can;
    return can;
}

bool conn_more(void) {
    return conn.fd >= 0 && out_len <= OUT_LIMIT && (conn.in || stalled);
}

struct channel *channel_find(uint32_t id) {
    struct channel *c = table[id % BUCKETS];
    while (c && c->id != id)
        c = c->next;
    return c;
}

struct channel *channel_open(uint32_t id) {
    if (channels >= CHANNEL_LIMIT) {
        send_error(id, EMFILE, CODE_BOUND, "4096 channels are open");
        return NULL;
    }
    struct channel *c = calloc(1, sizeof *c);
    if (!c) {
        send_error(id, ENOMEM, CODE_ERRNO, "no memory for a channel");
        return NULL;
    }
    c->id = id;
    c->window = WINDOW;
    c->next = table[id % BUCKETS];
    table[id % BUCKETS] = c;
    channels++;
    return c;
}

void channel_free(struct channel *c) {
    struct channel **at = &table[c->id % BUCKETS];
    while (*at && *at != c)
        at = &(*at)->next;
    if (*at) {
        *at = c->next;
        channels--;
    }
    free(c);
}

static void channels_close(void) {
    for (unsigned i = 0; i < BUCKETS; i++) {
        while (table[i]) {
            struct channel *c = table[i];
            if (c->exec)
                exec_detach(c->exec);
            else
                op_cancel(c->op);
        }
    }
}

void conn_drop(void) {
    if (conn.fd < 0)
        return;
    broken = true;
    channels_close();
    io_close(&conn);
    free(in_buf);
    free(out_buf);
    in_buf = out_buf = NULL;
    in_len = out_off = out_len = out_cap = 0;
    broken = stalled = false;
}

static bool out_of_descriptors(int err) { return err == EMFILE || err == ENFILE || err == ENOMEM || err == ENOBUFS; }

void conn_accept(void) {
    for (;;) {
        int fd = accept4(sv.listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            conn_drop();
            sv.fresh = true;
            int size = 1 << 20;
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
            io_watch(&conn, fd, EPOLLRDHUP | EPOLLET);
            conn.in = true;
            out_watched = false;
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno == EAGAIN)
            sv.listener.in = false;
        else if (out_of_descriptors(errno))
            drain_oldest();
        else
            shut_down("the listener failed");
        return;
    }
}

/* Appends to the queue; a queue that cannot grow ends the connection, never the sandbox. */
static void queue(const void *p, size_t n) {
    if (out_off && out_off + out_len + n > out_cap) {
        memmove(out_buf, out_buf + out_off, out_len);
        out_off = 0;
    }
    if (out_len + n > out_cap) {
        size_t cap = out_cap ? out_cap : 1024;
        while (cap < out_len + n)
            cap *= 2;
        uint8_t *grown = realloc(out_buf, cap);
        if (!grown) {
            broken = true;
            return;
        }
        out_buf = grown;
        out_cap = cap;
    }
    memcpy(out_buf + out_off + out_len, p, n);
    out_len += n;
}

static void queue_consume(size_t n) {
    out_off += n;
    out_len -= n;
    if (out_len == 0) {
        out_off = 0;
        if (out_cap > 65536) {
            free(out_buf);
            out_buf = NULL;
            out_cap = 0;
        }
    }
}

/* Writes what waits, then the two parts; what the socket does not take is queued. */
static void write_through(const void *head, size_t head_n, const void *p, size_t n) {
    struct iovec v[3] = {{out_buf ? out_buf + out_off : NULL, out_len}, {(void *)head, head_n}, {(void *)p, n}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 3};
    ssize_t sent = sendmsg(conn.fd, &m, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR)
            broken = true;
        sent = 0;
    }
    conn.out = (size_t)sent == out_len + head_n + n;
    size_t left = (size_t)sent, waiting = out_len;
    queue_consume(left < waiting ? left : waiting);
    left -= left < waiting ? left : waiting;
    size_t from_head = left < head_n ? left : head_n;
    left -= from_head;
    if (from_head < head_n)
        queue((const uint8_t *)head + from_head, head_n - from_head);
    if (left < n)
        queue((const uint8_t *)p + left, n - left);
}

static void send_parts(const uint8_t *head, size_t head_n, const void *p, size_t n) {
    if (conn.fd < 0 || broken)
        return;
    if (n < COPY_BELOW) {
        queue(head, head_n);
        if (n)
            queue(p, n);
        return;
    }
    sv.busy = true;
    write_through(head, head_n, p, n);
}

void send_frame(uint8_t kind, uint8_t flags, uint32_t channel, const void *p, size_t n) {
    uint8_t head[FRAME_HEAD];
    frame_head(head, (uint32_t)n, kind, flags, channel);
    send_parts(head, sizeof head, p, n);
}

void send_data(uint32_t channel, uint8_t flags, const uint64_t *offset, const void *p, size_t n) {
    uint8_t head[FRAME_HEAD + 8];
    size_t extra = offset ? 8 : 0;
    frame_head(head, (uint32_t)(n + extra), K_DATA, flags, channel);
    if (offset) {
        struct writer w = writer_of(head + FRAME_HEAD, 8);
        put_u64(&w, *offset);
    }
    send_parts(head, FRAME_HEAD + extra, p, n);
}

void send_ok(uint32_t channel) { send_frame(K_OK, 0, channel, NULL, 0); }

void send_error(uint32_t channel, int err, enum code code, const char *message) {
    uint8_t buf[600];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, (uint32_t)err);
    put_u8(&w, (uint8_t)code);
    put_bytes(&w, message, strnlen(message, 512));
    send_frame(K_ERROR, 0, channel, buf, w.len);
}

void conn_push(void) {
    if (conn.fd >= 0 && out_len && conn.out && !broken) {
        ssize_t n = send(conn.fd, out_buf + out_off, out_len, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            broken = true;
        if (n > 0)
            queue_consume((size_t)n);
        conn.out = out_len == 0 || (n < 0 && errno == EINTR);
    }
}

void conn_flush(void) {
    conn_push();
    if (conn.fd >= 0 && out_watched != !conn.out) {
        out_watched = !conn.out;
        io_want_out(&conn, out_watched);
    }
    if (broken)
        conn_drop();
}

/* Handles the whole frames that have arrived. False: the connection was dropped. */
static bool take_frames(void) {
    size_t off = 0;
    stalled = false;
    while (!broken) {
        if (out_len > OUT_LIMIT) {
            stalled = true;
            break;
        }
        struct frame f;
        long used = frame_next(in_buf + off, in_len - off, &f);
        if (used == 0)
            break;
        if (used < 0 || !dispatch(&f)) {
            conn_drop();
            return false;
        }
        off += (size_t)used;
    }
    if (broken) {
        conn_drop();
        return false;
    }
    if (off) {
        memmove(in_buf, in_buf + off, in_len - off);
        in_len -= off;
    }
    return true;
}

void conn_trim(void) {
    if (in_buf && in_len == 0) {
        free(in_buf);
        in_buf = NULL;
    }
}

/* Reads and handles what has arrived, bounded per turn. True: there may be more at once. */
bool conn_read(void) {
    if (conn.fd < 0)
        return false;
    if (!in_buf && !(in_buf = malloc(SCRATCH))) {
        conn_drop();
        return false;
    }
    for (int turn = 0; turn < READS_PER_TURN; turn++) {
        if (!take_frames() || out_len > OUT_LIMIT || !conn.in)
            return false;
        size_t space = SCRATCH - in_len;
        ssize_t n = read(conn.fd, in_buf + in_len, space);
        if (n > 0) {
            /* Less than asked for: nothing is left, and what comes next is a new event. */
            conn.in = (size_t)n == space || conn.hup;
            sv.busy |= n > 65536;
            in_len += (size_t)n;
            if (n > 65536)
                return take_frames();
        } else if (n < 0 && errno == EAGAIN) {
            conn.in = false;
        } else if (n == 0 || errno != EINTR) {
            conn_drop();
            return false;
        }
    }
    return true;
}
