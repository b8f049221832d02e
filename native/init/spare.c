/* Monitors that wait for a command, so that an EXEC need not fork one: released ones whose command left nothing behind,
 * and one made ahead when an engine connects. They are let go when init has been idle for a while, and hold no state
 * that anything depends on: whoever kills one only makes the next command start a little later. */
#include <unistd.h>

#include "init.h"

#define SPARES 2u

static struct monitor spares[SPARES];
static uint32_t count;

uint32_t spares_count(void) { return count; }

static void drop(uint32_t i) {
    close(spares[i].control);
    spares[i] = spares[--count];
}

bool spare_take(struct monitor *m) {
    if (count == 0)
        return false;
    *m = spares[--count];
    return true;
}

void spare_offer(const struct monitor *m) {
    if (count == SPARES || sv.killing) {
        close(m->control);
        return;
    }
    spares[count++] = *m;
    sv.busy = true; /* idle for a while, it goes */
}

/* Only when it is wanted and there is nothing else to do; without memory or processes for it there is none. */
void spare_make(void) {
    struct monitor m;
    if (!sv.spare_wanted)
        return;
    sv.spare_wanted = false;
    if (count == 0 && !sv.killing && monitor_fork(NULL, &m) == 0)
        spare_offer(&m);
}

void spares_let_go(void) {
    while (count)
        drop(count - 1);
}

void spares_reaped(pid_t pid) {
    for (uint32_t i = 0; i < count; i++)
        if (spares[i].pid == pid) {
            drop(i);
            return;
        }
}

void spares_carried(struct tree_usage *sum) {
    for (uint32_t i = 0; i < count; i++)
        usage_join(sum, &spares[i].before);
}
