#include "ring.h"

#include <stdlib.h>
#include <string.h>

/* Grows towards `want`. Without memory the ring stays as it is and keeps fewer bytes. */
static void grow(struct ring *r, size_t want) {
    size_t cap = r->cap ? r->cap : 512;
    while (cap < want)
        cap *= 2;
    if (cap > r->keep)
        cap = r->keep;
    if (cap <= r->cap)
        return;
    uint8_t *buf = malloc(cap);
    if (!buf)
        return;
    size_t first = r->cap - r->head < r->len ? r->cap - r->head : r->len;
    if (r->len) {
        memcpy(buf, r->buf + r->head, first);
        memcpy(buf + first, r->buf, r->len - first);
    }
    free(r->buf);
    r->buf = buf;
    r->cap = cap;
    r->head = 0;
}

void ring_add(struct ring *r, const uint8_t *p, size_t n) {
    size_t want = n < r->keep ? r->len + n : r->keep;
    if (want > r->cap)
        grow(r, want);
    if (r->cap == 0)
        return;
    if (n > r->cap) {
        p += n - r->cap;
        n = r->cap;
    }
    if (r->len + n > r->cap) {
        size_t drop = r->len + n - r->cap;
        r->head = (r->head + drop) % r->cap;
        r->len -= drop;
    }
    size_t at = (r->head + r->len) % r->cap;
    size_t first = r->cap - at < n ? r->cap - at : n;
    memcpy(r->buf + at, p, first);
    memcpy(r->buf, p + first, n - first);
    r->len += n;
}

size_t ring_peek(const struct ring *r, size_t back, const uint8_t **p) {
    if (back == 0 || back > r->len)
        return 0;
    size_t at = (r->head + r->len - back) % r->cap;
    *p = r->buf + at;
    return r->cap - at < back ? r->cap - at : back;
}

void ring_free(struct ring *r) {
    free(r->buf);
    *r = (struct ring){0};
}
