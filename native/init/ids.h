/* The exec ids init has seen: the last 65,536, as 64-bit hashes (a collision refuses an id, it never runs one twice). */
#ifndef DSEC_IDS_H
#define DSEC_IDS_H

#include <stdbool.h>

#include "../common/codec.h"

bool ids_seen(struct span id);
/* Remembers an id; false without memory. */
bool ids_add(struct span id);

#endif
