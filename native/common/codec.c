#include "codec.h"

#include <string.h>

struct reader reader_of(const void *p, size_t n) {
    return (struct reader){.p = p, .left = n, .bad = false};
}

static const uint8_t *take(struct reader *r, size_t n) {
    if (r->bad || r->left < n) {
        r->bad = true;
        r->left = 0;
        return NULL;
    }
    const uint8_t *p = r->p;
    r->p += n;
    r->left -= n;
    return p;
}

static uint64_t get_int(struct reader *r, unsigned size) {
    const uint8_t *p = take(r, size);
    uint64_t v = 0;
    for (unsigned i = 0; p && i < size; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

uint8_t get_u8(struct reader *r) { return (uint8_t)get_int(r, 1); }
uint16_t get_u16(struct reader *r) { return (uint16_t)get_int(r, 2); }
uint32_t get_u32(struct reader *r) { return (uint32_t)get_int(r, 4); }
uint64_t get_u64(struct reader *r) { return get_int(r, 8); }

struct span get_bytes(struct reader *r) {
    uint32_t n = get_u32(r);
    const uint8_t *p = take(r, n);
    return p ? (struct span){p, n} : (struct span){(const uint8_t *)"", 0};
}

struct span get_rest(struct reader *r) {
    size_t n = r->left;
    const uint8_t *p = take(r, n);
    return p && n ? (struct span){p, (uint32_t)n} : (struct span){(const uint8_t *)"", 0};
}

bool reader_done(const struct reader *r) { return !r->bad && r->left == 0; }

struct writer writer_of(void *p, size_t cap) {
    return (struct writer){.p = p, .cap = cap, .len = 0, .full = false};
}

static uint8_t *room(struct writer *w, size_t n) {
    if (w->full || w->cap - w->len < n) {
        w->full = true;
        return NULL;
    }
    uint8_t *p = w->p + w->len;
    w->len += n;
    return p;
}

static void put_int(struct writer *w, uint64_t v, unsigned size) {
    uint8_t *p = room(w, size);
    for (unsigned i = 0; p && i < size; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

void put_u8(struct writer *w, uint8_t v) { put_int(w, v, 1); }
void put_u16(struct writer *w, uint16_t v) { put_int(w, v, 2); }
void put_u32(struct writer *w, uint32_t v) { put_int(w, v, 4); }
void put_u64(struct writer *w, uint64_t v) { put_int(w, v, 8); }

void put_bytes(struct writer *w, const void *p, size_t n) {
    put_u32(w, (uint32_t)n);
    uint8_t *to = room(w, n);
    if (to && n)
        memcpy(to, p, n);
}

void patch_u32(struct writer *w, size_t at, uint32_t v) {
    if (w->full || at + 4 > w->len)
        return;
    for (unsigned i = 0; i < 4; i++)
        w->p[at + i] = (uint8_t)(v >> (8 * i));
}

void frame_head(uint8_t out[FRAME_HEAD], uint32_t length, uint8_t kind, uint8_t flags, uint32_t channel) {
    struct writer w = writer_of(out, FRAME_HEAD);
    put_u32(&w, length);
    put_u8(&w, kind);
    put_u8(&w, flags);
    put_u16(&w, 0);
    put_u32(&w, channel);
}

long frame_next(const uint8_t *p, size_t n, struct frame *out) {
    struct reader r = reader_of(p, n);
    if (n < FRAME_HEAD)
        return 0;
    uint32_t length = get_u32(&r);
    out->kind = get_u8(&r);
    out->flags = get_u8(&r);
    uint16_t reserved = get_u16(&r);
    out->channel = get_u32(&r);
    if (length > FRAME_MAX || reserved != 0)
        return -1;
    if (n - FRAME_HEAD < length)
        return 0;
    out->payload = (struct span){p + FRAME_HEAD, length};
    return (long)(FRAME_HEAD + length);
}

bool span_has_nul(struct span s) { return s.n && memchr(s.p, 0, s.n) != NULL; }
