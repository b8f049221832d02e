/* Fuzzes the decoder of init: a stream of frames, each decoded as a request, and every span and list walked.
 *
 * With libFuzzer (clang): LLVMFuzzerTestOneInput. With gcc this file brings its own driver:
 *   requests FILE…            runs each file once
 *   requests -n COUNT [SEED]  runs COUNT inputs derived from built-in seeds by a fixed random sequence
 * Build it with the sanitizers (`make fuzz`): they, and the asserts here, find what is wrong. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../init/request.h"

#define MOST 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink;
static uint64_t accepted_of[256];    /* by kind: a fuzzer that reaches nothing finds nothing */

static void check(bool truth, const char *what) {
    if (truth)
        return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

static void touch(struct span s) {
    for (uint32_t i = 0; i < s.n; i++)
        sink += s.p[i];
}

static void inside(struct span s, const struct frame *f) {
    touch(s);
    if (s.n)
        check(s.p >= f->payload.p && s.p + s.n <= f->payload.p + f->payload.n, "a span leaves the payload");
}

static void walk_strings(struct list l) {
    struct reader r = reader_of(l.p, l.size);
    for (uint32_t i = 0; i < l.count; i++)
        touch(get_bytes(&r));
    check(reader_done(&r), "a checked list does not end where it should");
}

static void walk_ops(struct list l) {
    struct reader r = reader_of(l.p, l.size);
    struct batch_op op;
    uint32_t n = 0;
    while (batch_next(&r, &op)) {
        touch(op.path);
        touch(op.data);
        n++;
    }
    check(n == l.count && reader_done(&r), "a checked batch does not end where it should");
}

static void accepted(const struct request *q, const struct frame *f) {
    accepted_of[q->kind]++;
    inside(q->id, f);
    inside(q->path, f);
    inside(q->other, f);
    inside(q->data, f);
    check(q->id.n <= ID_LIMIT && q->path.n <= PATH_LIMIT && q->other.n <= PATH_LIMIT, "a bound does not hold");
    check(!span_has_nul(q->path) && !span_has_nul(q->other), "NUL in a path");
    check(q->argv.count <= ITEMS_LIMIT && q->env.count <= ITEMS_LIMIT && q->groups.count <= GROUPS_LIMIT, "too many items");
    check(q->argv.size + q->env.size <= ARGS_LIMIT + 8 * ITEMS_LIMIT, "too many argument bytes");
    walk_strings(q->argv);
    walk_strings(q->env);
    check(q->groups.size == 4ull * q->groups.count, "groups");
    walk_ops(q->ops);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *exact = malloc(size ? size : 1); /* so that the sanitizer sees one byte too far */
    if (!exact)
        return 0;
    memcpy(exact, data, size);
    for (size_t at = 0; at < size;) {
        struct frame f;
        struct request q;
        long used = frame_next(exact + at, size - at, &f);
        if (used <= 0)
            break;
        if (request_decode(&f, &q) == REQUEST_OK)
            accepted(&q, &f);
        at += (size_t)used;
    }
    free(exact);
    return 0;
}

#ifndef DSEC_LIBFUZZER
static uint64_t state;

static uint32_t chance(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16) % below;
}

static void put_text(struct writer *w) {
    static const char *texts[] = {"", "x", "PATH=/bin", "a=b", "/workspace/f", "../up", "=", "/bin/true"};
    const char *t = texts[chance(8)];
    put_bytes(w, t, strlen(t));
}

static void put_texts(struct writer *w) {
    uint32_t n = chance(5);
    put_u32(w, n);
    while (n--)
        put_text(w);
}

static void put_numbers(struct writer *w, unsigned count) {
    while (count--)
        put_u32(w, chance(4) ? chance(100) : chance(UINT32_MAX));
}

static void put_op(struct writer *w) {
    put_u8(w, (uint8_t)chance(6));
    put_text(w);
    put_numbers(w, 3);
    put_text(w);
}

/* One frame that is right, or nearly: the layout of a random kind. */
static void put_frame(struct writer *w) {
    static const uint8_t kinds[] = {K_HELLO, K_EXEC, K_ATTACH, K_SIGNAL, K_WINSIZE, K_FORGET, K_LIST_EXECS, K_SHIFT,
                                    K_CREDIT, K_CLOSE, K_PING, K_USAGE, K_DATA, K_READ, K_WRITE, K_LIST, K_STAT,
                                    K_MKDIR, K_RENAME, K_REMOVE, K_SETATTR, K_WATCH, K_BATCH, K_TREE};
    uint8_t kind = kinds[chance(sizeof kinds)];
    uint8_t body[4096];
    struct writer b = writer_of(body, sizeof body);
    switch (kind) {
    case K_EXEC:
        put_text(&b);
        put_texts(&b);
        put_texts(&b);
        put_text(&b);
        put_numbers(&b, 2);
        put_u32(&b, 1);
        put_u32(&b, chance(9));
        put_numbers(&b, 9);
        break;
    case K_ATTACH: put_text(&b); put_numbers(&b, 5); break;
    case K_SIGNAL: put_text(&b); put_numbers(&b, 1); put_u8(&b, (uint8_t)chance(4)); break;
    case K_WINSIZE: put_text(&b); put_numbers(&b, 1); break;
    case K_FORGET: case K_PING: put_text(&b); break;
    case K_SHIFT: put_numbers(&b, 2); break;
    case K_HELLO: case K_CREDIT: put_numbers(&b, 1); break;
    case K_DATA: put_numbers(&b, chance(9)); break;
    case K_LIST_EXECS: case K_CLOSE: case K_USAGE: break;
    case K_BATCH: {
        uint32_t n = chance(4);
        put_numbers(&b, 2);
        put_text(&b);
        put_u32(&b, n);
        while (n--)
            put_op(&b);
        break;
    }
    default:
        put_numbers(&b, 2);
        put_text(&b);
        if (kind == K_RENAME || chance(3) == 0)
            put_text(&b);
        put_numbers(&b, kind == K_READ ? 5 : chance(6));
        if (kind == K_WRITE)
            put_text(&b);
        else if (chance(2))
            put_u8(&b, (uint8_t)chance(3));
        break;
    }
    uint8_t head[FRAME_HEAD];
    frame_head(head, (uint32_t)b.len, kind, chance(20) ? 0 : (uint8_t)chance(256), chance(4));
    for (unsigned i = 0; i < FRAME_HEAD; i++)
        put_u8(w, head[i]);
    for (size_t i = 0; i < b.len; i++)
        put_u8(w, body[i]);
}

static void spoil(uint8_t *p, size_t n) {
    for (uint32_t changes = chance(6); changes && n; changes--) {
        size_t at = chance((uint32_t)n);
        switch (chance(4)) {
        case 0: p[at] = (uint8_t)chance(256); break;
        case 1: p[at] ^= (uint8_t)(1u << chance(8)); break;
        case 2: p[at] = 0xFF; break;
        default: p[at] = 0; break;
        }
    }
}

static void run_generated(uint64_t count, uint64_t seed) {
    static uint8_t buf[MOST];
    state = seed * 0x9E3779B97F4A7C15u + 1;
    for (uint64_t i = 0; i < count; i++) {
        struct writer w = writer_of(buf, sizeof buf);
        for (uint32_t frames = 1 + chance(4); frames; frames--)
            put_frame(&w);
        size_t n = w.len;
        if (chance(3))
            spoil(buf, n);
        if (n && chance(4) == 0)
            n -= chance((uint32_t)n);
        LLVMFuzzerTestOneInput(buf, n);
    }
    uint64_t accepted = 0, kinds = 0;
    for (int k = 0; k < 256; k++) {
        accepted += accepted_of[k];
        kinds += accepted_of[k] != 0;
    }
    printf("%llu inputs, %llu requests of %llu kinds accepted, nothing broken\n", (unsigned long long)count,
           (unsigned long long)accepted, (unsigned long long)kinds);
}

static int run_file(const char *path) {
    static uint8_t buf[1 << 20];
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return 1;
    }
    size_t n = fread(buf, 1, sizeof buf, f);
    fclose(f);
    LLVMFuzzerTestOneInput(buf, n);
    return 0;
}

int main(int argc, char **argv) {
    if (argc >= 3 && strcmp(argv[1], "-n") == 0) {
        run_generated(strtoull(argv[2], NULL, 10), argc > 3 ? strtoull(argv[3], NULL, 10) : 1);
        return 0;
    }
    int failed = 0;
    for (int i = 1; i < argc; i++)
        failed |= run_file(argv[i]);
    return failed;
}
#endif
