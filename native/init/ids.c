#include "ids.h"

#include <stdlib.h>

#define REMEMBERED 65536u

static uint64_t *ring;               /* insertion order */
static uint32_t ring_cap, ring_len, ring_head;
static uint64_t *table;              /* open addressing, 0 is free; at most half full */
static uint32_t table_cap;

static uint64_t hash(struct span id) {
    uint64_t h = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < id.n; i++)
        h = (h ^ id.p[i]) * 0x100000001b3u;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    return h ? h : 1;
}

static uint32_t slot_of(uint64_t h) {
    uint32_t i = (uint32_t)h & (table_cap - 1);
    while (table[i] && table[i] != h)
        i = (i + 1) & (table_cap - 1);
    return i;
}

static void rebuild(void) {
    for (uint32_t i = 0; i < table_cap; i++)
        table[i] = 0;
    for (uint32_t i = 0; i < ring_len; i++) {
        uint64_t h = ring[(ring_head + i) % ring_cap];
        table[slot_of(h)] = h;
    }
}

static bool grow(void) {
    uint32_t cap = ring_cap ? ring_cap * 2 : 64;
    uint64_t *bigger = realloc(ring, cap * sizeof *ring);
    if (!bigger)
        return false;
    ring = bigger;
    uint64_t *slots = malloc(4u * cap * sizeof *slots);
    if (!slots)
        return false;
    free(table);
    table = slots;
    table_cap = 4 * cap;
    ring_cap = cap;
    rebuild();
    return true;
}

/* Forgets the oldest half at once: deleting one by one would need tombstones. The last 65,536 stay remembered. */
static void forget_old(void) {
    ring_head = (ring_head + ring_len / 2) % ring_cap;
    ring_len -= ring_len / 2;
    rebuild();
}

bool ids_seen(struct span id) {
    if (!table)
        return false;
    uint64_t h = hash(id);
    return table[slot_of(h)] == h;
}

bool ids_add(struct span id) {
    if (ring_len == ring_cap) {
        if (ring_cap < 2 * REMEMBERED) {
            if (!grow())
                return false;
        } else {
            forget_old();
        }
    }
    uint64_t h = hash(id);
    ring[(ring_head + ring_len++) % ring_cap] = h;
    table[slot_of(h)] = h;
    return true;
}
