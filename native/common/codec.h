/* Bounded reading and writing of protocol payloads, and the frame header.
 *
 * A reader never leaves its buffer: after the first field that does not fit, `bad` is set and every further read
 * gives zero. A writer never leaves its buffer: after the first field that does not fit, `full` is set. */
#ifndef DSEC_CODEC_H
#define DSEC_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FRAME_HEAD 12u
#define FRAME_MAX 262144u

struct span {
    const uint8_t *p;
    uint32_t n;
};

struct reader {
    const uint8_t *p;
    size_t left;
    bool bad;
};

struct writer {
    uint8_t *p;
    size_t cap, len;
    bool full;
};

struct frame {
    uint8_t kind, flags;
    uint32_t channel;
    struct span payload;
};

struct reader reader_of(const void *p, size_t n);
uint8_t get_u8(struct reader *r);
uint16_t get_u16(struct reader *r);
uint32_t get_u32(struct reader *r);
uint64_t get_u64(struct reader *r);
struct span get_bytes(struct reader *r);
struct span get_rest(struct reader *r);
/* True when every byte was read and no field was short. */
bool reader_done(const struct reader *r);

struct writer writer_of(void *p, size_t cap);
void put_u8(struct writer *w, uint8_t v);
void put_u16(struct writer *w, uint16_t v);
void put_u32(struct writer *w, uint32_t v);
void put_u64(struct writer *w, uint64_t v);
void put_bytes(struct writer *w, const void *p, size_t n);
/* Overwrites the u32 at `at`, which was written before. */
void patch_u32(struct writer *w, size_t at, uint32_t v);

void frame_head(uint8_t out[FRAME_HEAD], uint32_t length, uint8_t kind, uint8_t flags, uint32_t channel);
/* The frame at the start of `p`: bytes it occupies, 0 when more bytes are needed, -1 when it is malformed. */
long frame_next(const uint8_t *p, size_t n, struct frame *out);

bool span_has_nul(struct span s);

#endif
