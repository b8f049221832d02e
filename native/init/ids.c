#include "ids.h"

#include <stdlib.h>

#define REMEMBERED 65536u

/* Open addressing, 0 is free, at most three quarters full. */
struct set {
    uint64_t *slots;
    uint32_t cap, used;
};

static struct set recent, before;    /* `recent` holds up to REMEMBERED; then it becomes `before` */

static uint64_t hash(struct span id) {
    uint64_t h = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < id.n; i++)
        h = (h ^ id.p[i]) * 0x100000001b3u;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    return h ? h : 1;
}

static uint64_t *slot_of(const struct set *s, uint64_t h) {
    uint32_t i = (uint32_t)h & (s->cap - 1);
    while (s->slots[i] && s->slots[i] != h)
        i = (i + 1) & (s->cap - 1);
    return &s->slots[i];
}

static bool has(const struct set *s, uint64_t h) { return s->cap && *slot_of(s, h) == h; }

static bool grow(struct set *s) {
    struct set bigger = {.cap = s->cap ? s->cap * 2 : 64, .used = s->used};
    bigger.slots = calloc(bigger.cap, sizeof *bigger.slots);
    if (!bigger.slots)
        return false;
    for (uint32_t i = 0; i < s->cap; i++)
        if (s->slots[i])
            *slot_of(&bigger, s->slots[i]) = s->slots[i];
    free(s->slots);
    *s = bigger;
    return true;
}

bool ids_seen(struct span id) {
    uint64_t h = hash(id);
    return has(&recent, h) || has(&before, h);
}

bool ids_add(struct span id) {
    if (recent.used == REMEMBERED) {
        free(before.slots);
        before = recent;
        recent = (struct set){0};
    }
    if (recent.used >= recent.cap / 4 * 3 && !grow(&recent))
        return false;
    uint64_t h = hash(id);
    *slot_of(&recent, h) = h;
    recent.used++;
    return true;
}
