#include "request.h"

#include <string.h>

static void out_of_range(struct request *q, const char *why) {
    if (!q->why)
        q->why = why;
}

static void check_path(struct request *q, struct span s, bool may_be_empty) {
    if (s.n > PATH_LIMIT)
        out_of_range(q, "a path has more than 4095 bytes");
    if (s.n == 0 && !may_be_empty)
        out_of_range(q, "a path is empty");
    if (span_has_nul(s))
        out_of_range(q, "a path contains NUL");
}

static void get_id(struct reader *r, struct request *q) {
    q->id = get_bytes(r);
    if (q->id.n == 0 || q->id.n > ID_LIMIT)
        out_of_range(q, "an exec id has 1 to 64 bytes");
}

static void get_who(struct reader *r, struct request *q) {
    q->uid = get_u32(r);
    q->gid = get_u32(r);
    if (q->uid == UINT32_MAX || q->gid == UINT32_MAX)
        out_of_range(q, "4294967295 is not an id");
}

static void get_who_path(struct reader *r, struct request *q) {
    get_who(r, q);
    q->path = get_bytes(r);
    check_path(q, q->path, false);
}

static struct list get_strings(struct reader *r, struct request *q) {
    struct list l = {.count = get_u32(r)};
    l.p = r->p;
    for (uint32_t i = 0; i < l.count && !r->bad; i++)
        if (span_has_nul(get_bytes(r)))
            out_of_range(q, "an argument or variable contains NUL");
    l.size = r->bad ? 0 : (size_t)(r->p - l.p);
    if (l.count > ITEMS_LIMIT)
        out_of_range(q, "more than 4096 items");
    return l;
}

static void check_env(struct request *q) {
    struct reader r = reader_of(q->env.p, q->env.size);
    for (uint32_t i = 0; i < q->env.count; i++) {
        struct span s = get_bytes(&r);
        const uint8_t *eq = s.n ? memchr(s.p, '=', s.n) : NULL;
        if (!eq || eq == s.p)
            out_of_range(q, "an environment entry is not NAME=VALUE");
    }
}

static void get_groups(struct reader *r, struct request *q) {
    q->groups.count = get_u32(r);
    q->groups.p = r->p;
    for (uint32_t i = 0; i < q->groups.count && !r->bad; i++)
        get_u32(r);
    q->groups.size = r->bad ? 0 : (size_t)(r->p - q->groups.p);
    if (q->groups.count > GROUPS_LIMIT)
        out_of_range(q, "more than 256 groups");
}

static void decode_exec(struct reader *r, struct request *q) {
    get_id(r, q);
    q->argv = get_strings(r, q);
    q->env = get_strings(r, q);
    q->other = get_bytes(r);
    get_who(r, q);
    get_groups(r, q);
    q->bits = get_u32(r);
    q->rows = get_u16(r);
    q->cols = get_u16(r);
    q->a = get_u64(r);
    q->keep = get_u64(r);
    q->nofile = get_u64(r);
    q->credit = get_u32(r);
    if (r->bad)
        return;
    check_path(q, q->other, true);
    check_env(q);
    if (q->argv.count == 0)
        out_of_range(q, "argv is empty");
    if (q->argv.size + q->env.size > ARGS_LIMIT + 8 * ITEMS_LIMIT ||
        q->argv.size - 4ull * q->argv.count + q->env.size - 4ull * q->env.count > ARGS_LIMIT)
        out_of_range(q, "argv and env have more than 196608 bytes");
    if (q->bits & ~(EXEC_PTY | EXEC_STDIN | EXEC_LATE))
        out_of_range(q, "unknown exec flag");
    if (q->a > TIMEOUT_LIMIT)
        out_of_range(q, "timeout_ms is above 2^40");
    if (q->keep > KEEP_LIMIT)
        out_of_range(q, "keep is above 64 MiB");
}

static void decode_attach(struct reader *r, struct request *q) {
    get_id(r, q);
    q->a = get_u64(r);
    q->b = get_u64(r);
    q->credit = get_u32(r);
}

static void decode_signal(struct reader *r, struct request *q) {
    get_id(r, q);
    q->number = get_u32(r);
    q->bits = get_u8(r);
    if (q->number < 1 || q->number > 64)
        out_of_range(q, "a signal number is 1 to 64");
    if (q->bits > 2)
        out_of_range(q, "scope is 0, 1 or 2");
}

static void decode_winsize(struct reader *r, struct request *q) {
    get_id(r, q);
    q->rows = get_u16(r);
    q->cols = get_u16(r);
}

static void decode_read(struct reader *r, struct request *q) {
    get_who_path(r, q);
    q->a = get_u64(r);
    q->b = get_u64(r);
    q->credit = get_u32(r);
    if (q->a > INT64_MAX)
        out_of_range(q, "offset is above 2^63-1");
}

static void decode_write(struct reader *r, struct request *q) {
    get_who_path(r, q);
    q->mode = get_u32(r);
    q->bits = get_u32(r);
    q->other = get_bytes(r);
    check_path(q, q->other, true);
    if (q->mode > 07777)
        out_of_range(q, "mode is above 07777");
    if (q->bits > 31)
        out_of_range(q, "unknown write flag");
    if ((q->bits & WRITE_APPEND) && (q->bits & WRITE_ATOMIC))
        out_of_range(q, "append and atomic exclude each other");
}

static void decode_setattr(struct reader *r, struct request *q) {
    get_who_path(r, q);
    q->bits = get_u8(r);
    q->mode = get_u32(r);
    q->owner = get_u32(r);
    q->group = get_u32(r);
    q->mtime = (int64_t)get_u64(r);
    if (q->bits > 15)
        out_of_range(q, "unknown mask bit");
    if ((q->bits & ATTR_MODE) && q->mode > 07777)
        out_of_range(q, "mode is above 07777");
}

bool batch_next(struct reader *r, struct batch_op *op) {
    if (r->left == 0)
        return false;
    op->what = get_u8(r);
    op->path = get_bytes(r);
    op->mode = get_u32(r);
    op->mtime = (int64_t)get_u64(r);
    op->data = get_bytes(r);
    return !r->bad;
}

static void check_batch_op(struct request *q, const struct batch_op *op) {
    check_path(q, op->path, false);
    if (op->what < 1 || op->what > 4)
        out_of_range(q, "a batch op is 1 to 4");
    if (op->mode > 07777)
        out_of_range(q, "mode is above 07777");
    if (op->what >= 3)
        check_path(q, op->data, false);
}

static void decode_batch(struct reader *r, struct request *q) {
    get_who(r, q);
    q->path = get_bytes(r);
    check_path(q, q->path, false);
    q->ops.count = get_u32(r);
    q->ops.p = r->p;
    for (uint32_t i = 0; i < q->ops.count && !r->bad; i++) {
        struct batch_op op;
        if (r->left == 0 || !batch_next(r, &op)) {
            r->bad = true;
            break;
        }
        check_batch_op(q, &op);
    }
    q->ops.size = r->bad ? 0 : (size_t)(r->p - q->ops.p);
}

static void decode_tree(struct reader *r, struct request *q) {
    get_who_path(r, q);
    q->a = get_u64(r);
    q->number = get_u32(r);
    q->credit = get_u32(r);
}

static void decode_path_and(struct reader *r, struct request *q) {
    get_who_path(r, q);
    switch (q->kind) {
    case K_LIST: q->number = get_u32(r); break;
    case K_MKDIR:
        q->mode = get_u32(r);
        q->bits = get_u8(r);
        if (q->mode > 07777)
            out_of_range(q, "mode is above 07777");
        break;
    case K_RENAME:
        q->other = get_bytes(r);
        check_path(q, q->other, false);
        q->bits = get_u8(r);
        break;
    default: q->bits = get_u8(r); break; /* STAT, REMOVE, WATCH */
    }
    if (q->bits > 1)
        out_of_range(q, "a flag is 0 or 1");
}

static bool decode_body(struct reader *r, struct request *q) {
    switch (q->kind) {
    case K_HELLO: case K_CREDIT: q->number = get_u32(r); return true;
    case K_EXEC: decode_exec(r, q); return true;
    case K_ATTACH: decode_attach(r, q); return true;
    case K_SIGNAL: decode_signal(r, q); return true;
    case K_WINSIZE: decode_winsize(r, q); return true;
    case K_FORGET: get_id(r, q); return true;
    case K_SHIFT: q->a = get_u64(r); return true;
    case K_PING: q->data = get_bytes(r); return true;
    case K_LIST_EXECS: case K_CLOSE: case K_USAGE: return true;
    case K_DATA: q->data = get_rest(r); return true;
    case K_READ: decode_read(r, q); return true;
    case K_WRITE: decode_write(r, q); return true;
    case K_SETATTR: decode_setattr(r, q); return true;
    case K_BATCH: decode_batch(r, q); return true;
    case K_TREE: decode_tree(r, q); return true;
    case K_LIST: case K_STAT: case K_MKDIR: case K_RENAME: case K_REMOVE: case K_WATCH:
        decode_path_and(r, q);
        return true;
    default: return false;
    }
}

enum verdict request_decode(const struct frame *f, struct request *q) {
    memset(q, 0, sizeof *q);
    q->kind = f->kind;
    q->flags = f->flags;
    q->channel = f->channel;
    q->payload = f->payload;
    if (f->kind == K_DATA ? (f->flags & ~FLAG_END) != 0 : f->flags != 0)
        return REQUEST_MALFORMED;
    struct reader r = reader_of(f->payload.p, f->payload.n);
    if (!decode_body(&r, q) || !reader_done(&r))
        return REQUEST_MALFORMED;
    return q->why ? REQUEST_RANGE : REQUEST_OK;
}
