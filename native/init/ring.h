/* The last bytes of a stream, for re-attachment. Memory grows with what was written, up to `keep`. */
#ifndef DSEC_RING_H
#define DSEC_RING_H

#include <stddef.h>
#include <stdint.h>

struct ring {
    uint8_t *buf;
    size_t cap, head, len;           /* head: index of the oldest byte */
    size_t keep;
};

void ring_add(struct ring *r, const uint8_t *p, size_t n);
/* The `back`th byte from the end and those after it that lie contiguously; 0 when back is 0 or above len. */
size_t ring_peek(const struct ring *r, size_t back, const uint8_t **p);
void ring_free(struct ring *r);

#endif
