/* From a decoded request to the operation that answers it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "init.h"

static bool greeted;

struct op *op_new(size_t size, const struct op_type *type, uint32_t channel, uint32_t credit) {
    struct op *op = calloc(1, size);
    struct channel *c = op ? channel_open(channel) : NULL;
    if (!c) {
        if (!op)
            send_error(channel, ENOMEM, CODE_ERRNO, "no memory for the operation");
        free(op);
        return NULL;
    }
    c->op = op;
    c->credit = credit;
    op->channel = c;
    op->type = type;
    op->next = sv.ops;
    if (sv.ops)
        sv.ops->prev = op;
    sv.ops = op;
    return op;
}

void op_end(struct op *op) {
    if (op->prev)
        op->prev->next = op->next;
    else
        sv.ops = op->next;
    if (op->next)
        op->next->prev = op->prev;
    channel_free(op->channel);
    if (op->type->release)
        op->type->release(op);
    free(op);
}

void op_fail(struct op *op, int err, enum code code, const char *message) {
    send_error(op->channel->id, err, code, message);
    op_end(op);
}

void op_cancel(struct op *op) {
    if (op->type->cancel)
        op->type->cancel(op);
    op_end(op);
}

bool ops_pump(void) {
    bool more = false;
    for (struct op *op = sv.ops, *next; op; op = next) {
        next = op->next;
        if (op->type->pump)
            more |= op->type->pump(op);
    }
    return more;
}

static bool hello(const struct request *q) {
    if (greeted)
        return false;
    if (q->number != 1) {
        send_error(q->channel, EPROTONOSUPPORT, CODE_RANGE, "init speaks version 1");
        return true;
    }
    uint8_t buf[16];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, 1);
    put_u32(&w, FRAME_MAX);
    put_u32(&w, (uint32_t)getpid());
    put_u32(&w, sv.pidns ? 1 : 0);
    send_frame(K_WELCOME, 0, q->channel, buf, w.len);
    greeted = true;
    sv.spare_wanted = true;
    return true;
}

static uint64_t micros(struct timeval t) { return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_usec; }

static void usage(uint32_t channel) {
    struct rusage ru;
    struct tree_usage carried = {0};
    getrusage(RUSAGE_CHILDREN, &ru);
    spares_carried(&carried);
    execs_carried(&carried);
    uint32_t processes = tree_count(), spares = spares_count();
    uint8_t buf[24];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, processes > spares ? processes - spares : 0);
    put_u32(&w, execs_kept());
    put_u64(&w, micros(ru.ru_utime) + carried.user_us);
    put_u64(&w, micros(ru.ru_stime) + carried.system_us);
    send_frame(K_USAGE_IS, 0, channel, buf, w.len);
}

static void pong(const struct request *q) {
    /* The request's payload is the answer's payload: its length field precedes the bytes. */
    send_frame(K_PONG, 0, q->channel, q->data.p - 4, q->data.n + 4u);
}

/* Credit and content for a channel that has ended are late, not wrong. */
static bool on_channel(const struct request *q) {
    struct channel *c = channel_find(q->channel);
    if (!c)
        return true;
    if (q->kind == K_CREDIT) {
        c->credit += q->number;
        return true;
    }
    if (q->kind == K_CLOSE) {
        if (c->exec)
            exec_detach(c->exec);
        else
            op_cancel(c->op);
        return true;
    }
    if (q->data.n > c->window)
        return false;
    c->window -= q->data.n;
    if (c->exec)
        return exec_input(c->exec, q->data, q->flags & FLAG_END);
    if (!c->op->type->data)
        return false;
    c->op->type->data(c->op, q->data, q->flags & FLAG_END);
    return true;
}

static void run(const struct request *q) {
    switch (q->kind) {
    case K_EXEC: exec_start(q); break;
    case K_ATTACH: exec_attach(q); break;
    case K_SIGNAL: exec_signal(q); break;
    case K_WINSIZE: exec_winsize(q); break;
    case K_FORGET: exec_forget(q); break;
    case K_LIST_EXECS: exec_list(q->channel); break;
    case K_SHIFT: exec_shift(q->a); send_ok(q->channel); break;
    case K_PING: pong(q); break;
    case K_USAGE: usage(q->channel); break;
    case K_READ: file_read(q); break;
    case K_WRITE: file_write(q); break;
    case K_LIST: dir_list(q); break;
    case K_STAT: path_stat(q); break;
    case K_MKDIR: path_mkdir(q); break;
    case K_RENAME: path_rename(q); break;
    case K_REMOVE: path_remove(q); break;
    case K_SETATTR: path_setattr(q); break;
    case K_WATCH: watch_start(q); break;
    case K_BATCH: batch_start(q); break;
    case K_TREE: tree_start(q); break;
    default: break;
    }
}

/* Operations that live on need a channel of their own. */
static bool needs_channel(uint8_t kind) {
    return kind == K_EXEC || kind == K_ATTACH || (kind >= K_READ && kind <= K_TREE);
}

bool dispatch(const struct frame *f) {
    struct request q;
    if (sv.fresh) {
        greeted = false;
        sv.fresh = false;
    }
    enum verdict v = request_decode(f, &q);
    if (v == REQUEST_MALFORMED || (q.kind == K_HELLO ? f->channel != 0 : !greeted))
        return false;
    if (q.kind == K_HELLO)
        return hello(&q);
    if (q.kind == K_CREDIT || q.kind == K_CLOSE || q.kind == K_DATA)
        return on_channel(&q);
    if (channel_find(q.channel) || (q.channel == 0 && needs_channel(q.kind)))
        return false;
    if (v == REQUEST_RANGE)
        send_error(q.channel, EINVAL, CODE_RANGE, q.why);
    else
        run(&q);
    return true;
}
