/* Monitors that wait for a command, so that an EXEC need not fork one: released ones whose command left nothing behind,
 * and one made ahead when an engine connects. They are let go when init has been idle for a while, and hold no state
 * that anything depends on: whoever kills one only makes the next command start a little later. */
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "init.h"

#define SPARES 2u

static struct spare {
    struct monitor m;
    bool waits;                      /* false: it was asked to, and has not answered yet */
} spares[SPARES];
static uint32_t count;

uint32_t spares_count(void) { return count; }

static void drop(uint32_t i) {
    close(spares[i].m.control);
    spares[i] = spares[--count];
}

/* Whether it waits by now. A monitor that did something else is dropped: true, and `i` names another. */
static bool gone(uint32_t i) {
    struct report r;
    if (spares[i].waits)
        return false;
    ssize_t n = recv(spares[i].m.control, &r, sizeof r, MSG_DONTWAIT);
    spares[i].waits = n == (ssize_t)sizeof r && r.what == REPORT_WAITING;
    if (spares[i].waits || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return false;
    drop(i);
    return true;
}

bool spare_take(struct monitor *m) {
    for (uint32_t i = 0; i < count;) {
        if (gone(i))
            continue;
        if (spares[i].waits) {
            *m = spares[i].m;
            spares[i] = spares[--count];
            return true;
        }
        i++;
    }
    return false;
}

static void add(const struct monitor *m, bool waits) {
    spares[count++] = (struct spare){*m, waits};
    sv.busy = true; /* idle for a while, it goes */
}

void spare_offer(const struct monitor *m) {
    char order = count < SPARES && !sv.killing ? ORDER_WAIT : ORDER_GO;
    bool sent = send(m->control, &order, 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
    if (sent && order == ORDER_WAIT)
        add(m, false);
    else
        close(m->control);
}

/* Only when it is wanted and there is nothing else to do; without memory or processes for it there is none. */
void spare_make(void) {
    struct monitor m;
    if (!sv.spare_wanted)
        return;
    sv.spare_wanted = false;
    if (count == 0 && !sv.killing && monitor_fork(NULL, &m) == 0)
        add(&m, true);
}

void spares_let_go(void) {
    while (count)
        drop(count - 1);
}

void spares_reaped(pid_t pid) {
    for (uint32_t i = 0; i < count; i++)
        if (spares[i].m.pid == pid) {
            drop(i);
            return;
        }
}

void spares_carried(struct tree_usage *sum) {
    for (uint32_t i = 0; i < count; i++)
        usage_join(sum, &spares[i].m.before);
}
