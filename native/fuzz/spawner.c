/* The spawner's decoder of CREATE against generated and spoilt requests: whatever it accepts keeps its own rules, and no
 * span leaves the message. Each input is copied to a buffer of exactly its size, so that the sanitizers see every step aside.
 *
 *   spawner -n COUNT [SEED]     generated inputs      spawner FILE...     these
 * With -DDSEC_LIBFUZZER there is no main: the fuzzer has its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../spawner/spawner.h"

#define MOST 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What message.c needs of the rest of the spawner, never called by the decoder. */
void note(const char *what, const char *name, int err) {
    (void)what, (void)name, (void)err;
    abort();
}
uint64_t slot_oom_kills(const struct spawner *s, uint32_t slot) {
    (void)s, (void)slot;
    abort();
}

static uint64_t accepted;

static void must(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

static void within(struct span s, const uint8_t *data, size_t size, size_t max) {
    must(s.n >= 1 && s.n <= max, "length");
    must(s.p >= data && s.p + s.n <= data + size, "a span leaves the message");
    must(!memchr(s.p, 0, s.n), "NUL");
}

static void name(struct span s, const uint8_t *data, size_t size, size_t max) {
    within(s, data, size, max);
    must(!memchr(s.p, '/', s.n) && s.p[0] != '.', "a name climbs");
}

static void check(const struct plan *p, const uint8_t *data, size_t size, const int *fds, unsigned n_fds) {
    name(p->id, data, size, ID_MAX);
    name(p->hostname, data, size, 63);
    name(p->writable, data, size, 127);
    within(p->directory, data, size, 4095);
    must(p->n_layers <= LAYERS_MAX && p->n_volumes <= VOLUMES_MAX, "counts");
    for (unsigned i = 0; i < p->n_layers; i++) name(p->layers[i], data, size, 127);
    must(n_fds == p->n_volumes + 1 && p->listener == fds[0], "descriptors");
    for (unsigned i = 0; i < p->n_volumes; i++) {
        within(p->volumes[i].target, data, size, 4095);
        must(p->volumes[i].target.p[0] == '/' && p->volumes[i].fd == fds[i + 1], "volume");
    }
}

/* The first byte says how many descriptors came along; the rest is the body. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int fds[FDS_MAX];
    if (!size) return 0;
    unsigned n_fds = data[0] % (FDS_MAX + 1);
    for (unsigned i = 0; i < FDS_MAX; i++) fds[i] = 1000 + (int)i;
    uint8_t *copy = malloc(size - 1 ? size - 1 : 1);
    if (!copy) abort();
    memcpy(copy, data + 1, size - 1);
    struct plan p;
    memset(&p, 0, sizeof p);
    struct reader r = reader_of(copy, size - 1);
    if (parse_create(&r, &p, fds, n_fds)) {
        accepted++;
        check(&p, copy, size - 1, fds, n_fds);
    }
    free(copy);
    return 0;
}

#ifndef DSEC_LIBFUZZER
static uint64_t state;

static uint32_t chance(uint32_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? (uint32_t)(state >> 20) % n : 0;
}

/* Mostly fine; now and then empty, long, climbing or with a NUL. */
static void put_text(struct writer *w, const char *start, uint32_t usual) {
    char text[5000];
    uint32_t n = 1 + chance(usual);
    if (!chance(40)) n = 0;
    if (!chance(40)) n = chance(sizeof text);
    for (uint32_t i = 0; i < n; i++) text[i] = (char)('a' + chance(26));
    for (uint32_t i = 0; start[i] && i < n; i++) text[i] = start[i];
    if (n && !chance(40)) text[chance(n)] = "/.\0~"[chance(4)];
    put_bytes(w, text, n);
}

static uint32_t count(uint32_t max) { return chance(20) ? chance(4) : chance(max + 2); }

static size_t generate(uint8_t *buf) {
    struct writer w = writer_of(buf, MOST);
    put_u8(&w, 0);
    for (int i = 0; i < 3; i++) put_text(&w, "sb-", 20);
    put_text(&w, "/", 30);
    put_u8(&w, (uint8_t)chance(2));
    for (int i = 0; i < 5; i++) put_u64(&w, state);
    uint32_t n = count(LAYERS_MAX);
    put_u32(&w, n);
    while (n--) put_text(&w, "sha256-", 80);
    uint32_t volumes = n = count(VOLUMES_MAX);
    put_u32(&w, n);
    while (n--) {
        put_text(&w, "/", 30);
        put_u8(&w, (uint8_t)chance(2));
    }
    buf[0] = (uint8_t)(volumes + (chance(20) ? 1 : chance(3)));
    return w.len;
}

static void spoil(uint8_t *p, size_t n) {
    static const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff, '/', '.'};
    for (uint32_t changes = chance(4); changes && n; changes--) {
        size_t at = chance((uint32_t)n);
        p[at] = chance(2) ? values[chance(sizeof values)] : (uint8_t)chance(256);
    }
}

static int run_file(const char *path) {
    static uint8_t buf[MOST];
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return 1;
    }
    size_t n = fread(buf, 1, sizeof buf, f);
    fclose(f);
    return LLVMFuzzerTestOneInput(buf, n);
}

int main(int argc, char **argv) {
    static uint8_t buf[MOST];
    int failed = 0;
    if (argc < 3 || strcmp(argv[1], "-n")) {
        for (int i = 1; i < argc; i++) failed |= run_file(argv[i]);
        return failed;
    }
    uint64_t total = strtoull(argv[2], NULL, 10);
    state = (argc > 3 ? strtoull(argv[3], NULL, 10) : 1) * 0x9E3779B97F4A7C15u + 1;
    for (uint64_t i = 0; i < total; i++) {
        size_t n = generate(buf);
        if (!chance(3)) spoil(buf, n);
        if (!chance(4)) n -= chance((uint32_t)n);
        LLVMFuzzerTestOneInput(buf, n);
    }
    printf("%llu inputs, %llu accepted, nothing broken\n", (unsigned long long)total, (unsigned long long)accepted);
    return 0;
}
#endif
