/* Requests of the engine, decoded and range-checked. Spans point into the payload they were decoded from. */
#ifndef DSEC_REQUEST_H
#define DSEC_REQUEST_H

#include "../common/codec.h"

enum kind {
    K_HELLO = 0x01, K_EXEC, K_ATTACH, K_SIGNAL, K_WINSIZE, K_FORGET, K_LIST_EXECS, K_SHIFT, K_CREDIT, K_CLOSE, K_PING,
    K_USAGE, K_DATA = 0x10, K_READ = 0x20, K_WRITE, K_LIST, K_STAT, K_MKDIR, K_RENAME, K_REMOVE, K_SETATTR, K_WATCH,
    K_BATCH, K_TREE, K_OK = 0x80, K_WELCOME, K_ERROR, K_STARTED, K_EXIT, K_EXECS, K_ENTRY, K_ENTRIES, K_EVENTS,
    K_BATCH_DONE, K_PONG, K_USAGE_IS
};

enum code { CODE_ERRNO = 0, CODE_RANGE = 1, CODE_TYPE = 2, CODE_BOUND = 3, CODE_UNKNOWN = 4 };

#define FLAG_END 0x80u
#define EXEC_PTY 1u
#define EXEC_STDIN 2u
#define EXEC_LATE 4u                 /* STARTED may come with what follows it */
#define WRITE_CREATE 1u
#define WRITE_EXCLUSIVE 2u
#define WRITE_APPEND 4u
#define WRITE_PARENTS 8u
#define WRITE_ATOMIC 16u
#define ATTR_MODE 1u
#define ATTR_OWNER 2u
#define ATTR_MTIME 4u
#define ATTR_FOLLOW 8u

#define PATH_LIMIT 4095u
#define ID_LIMIT 64u
#define ARGS_LIMIT 196608u
#define ITEMS_LIMIT 4096u
#define GROUPS_LIMIT 256u
#define KEEP_LIMIT (64ull << 20)
#define TIMEOUT_LIMIT (1ull << 40)
#define WINDOW 262144u

/* A list<bytes> (or list<u32>, or list<op>) whose structure was checked: `p` is its first item. */
struct list {
    const uint8_t *p;
    size_t size;     /* bytes of all items */
    uint32_t count;
};

struct request {
    uint8_t kind, flags;
    uint32_t channel;
    struct span id, path, other, data;   /* other: cwd, root, or the second path */
    struct span payload;                 /* all of it, as it came */
    struct list argv, env, groups, ops;
    uint32_t uid, gid, bits, mode, number, owner, group, credit;
    uint16_t rows, cols;
    uint64_t a, b;                       /* offset/length, stdout/stderr offset, max bytes, timeout */
    uint64_t keep, nofile;
    int64_t mtime;
    const char *why;                     /* what is out of range */
};

struct batch_op {
    uint8_t what;
    struct span path, data;
    uint32_t mode;
    int64_t mtime;
};

enum verdict { REQUEST_OK, REQUEST_RANGE, REQUEST_MALFORMED };

enum verdict request_decode(const struct frame *f, struct request *q);
/* The next op of a BATCH whose list was checked; false at its end. */
bool batch_next(struct reader *r, struct batch_op *op);

#endif
