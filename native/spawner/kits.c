/* Kits: a user namespace for one slot and a network namespace, fresh, each used once.
 *
 * Both are slow to make and depend on nothing of the sandbox but its slot, so a helper process makes a few ahead while
 * the spawner waits. When there is none, the sandbox's own process makes what it needs. */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spawner.h"

static int loopback_up(void) {
    struct ifreq request = {.ifr_flags = IFF_UP};
    strcpy(request.ifr_name, "lo");
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int r = fd < 0 ? -1 : ioctl(fd, SIOCSIFFLAGS, &request);
    if (fd >= 0) close(fd);
    return r;
}

/* The caller moves into a new network namespace with `lo` up; its descriptor, or -1. */
int kit_network(int proc) {
    if (unshare(CLONE_NEWNET) || loopback_up()) return -1;
    return openat(proc, "self/ns/net", O_RDONLY | O_CLOEXEC);
}

struct naming {
    int proc, fd;
};

static int name_users(void *arg) {
    struct naming *n = arg;
    n->fd = openat(n->proc, "self/ns/user", O_RDONLY | O_CLOEXEC);
    _exit(0);
}

/* A new user namespace for the ids from `uid` on; its descriptor, or -1. Its first process lives just long enough to name
 * it; the maps are written while that is a zombie: until it is reaped, /proc still leads to its namespace. `pids` is the
 * /proc in which the new process has the number that clone tells. */
int kit_users(int pids, int proc, uint32_t uid) {
    static char stack[16384] __attribute__((aligned(16)));
    struct naming n = {.proc = proc, .fd = -1};
    pid_t helper = clone(name_users, stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_NEWUSER | SIGCHLD, &n);
    if (helper < 0) return -1;
    char map[48], path[48];
    snprintf(map, sizeof map, "0 %u %u\n", uid, SLOT_IDS);
    snprintf(path, sizeof path, "%d/uid_map", helper);
    bool ok = write_at(pids, path, map);
    snprintf(path, sizeof path, "%d/gid_map", helper);
    ok = ok && write_at(pids, path, map);
    int err = errno;
    waitpid(helper, NULL, __WALL);
    if (!ok && n.fd >= 0) close(n.fd);
    errno = err;
    return ok ? n.fd : -1;
}

/* ---- the helper process ---- */

struct order {
    uint32_t slot;
};

static void send_kit(int to, const struct order *order, int *fds) {
    char control[CMSG_SPACE(2 * sizeof(int))];
    struct iovec part = {(void *)order, sizeof *order};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(2 * sizeof(int));
    memcpy(CMSG_DATA(h), fds, 2 * sizeof(int));
    if (sendmsg(to, &m, MSG_NOSIGNAL) < 0) _exit(0);
}

static _Noreturn void maker(const struct spawner *s, int orders) {
    struct order order;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "dsec-kits");
    setpriority(PRIO_PROCESS, 0, 0);
    while (recv(orders, &order, sizeof order, 0) == sizeof order) {
        int fds[2] = {kit_users(s->proc, s->proc, slot_uid(order.slot)), kit_network(s->proc)};
        if (fds[0] < 0 || fds[1] < 0) _exit(1); /* the sandboxes' own processes will say what is wrong */
        send_kit(orders, &order, fds);
        close(fds[0]);
        close(fds[1]);
    }
    _exit(0); /* the spawner is gone */
}

void kits_start(struct spawner *s) {
    int pair[2];
    s->kit_orders = -1;
    if (s->config.level != LEVEL_CONTAINER || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return;
    pid_t pid = fork();
    if (pid == 0) {
        close(pair[0]);
        close(s->listener);
        close(s->lifeline);
        maker(s, pair[1]);
    }
    close(pair[1]);
    if (pid < 0) close(pair[0]);
    else s->kit_orders = pair[0];
}

static void order_kit(struct spawner *s, struct kit *kit) {
    const char *step;
    long slot = slot_reserve(s, &step);
    if (slot < 0) return;
    struct order order = {.slot = (uint32_t)slot};
    if (send(s->kit_orders, &order, sizeof order, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        slot_at(s, order.slot)->used = false;
        return;
    }
    *kit = (struct kit){.state = KIT_ORDERED, .slot = order.slot, .users = -1, .network = -1};
}

void kits_refill(struct spawner *s) {
    for (unsigned i = 0; s->kit_orders >= 0 && i < KITS; i++)
        if (s->kits[i].state == KIT_NONE) order_kit(s, &s->kits[i]);
}

/* One made by the helper, or all lost with it. */
void kits_arrived(struct spawner *s) {
    struct order order;
    char control[CMSG_SPACE(2 * sizeof(int))];
    struct iovec part = {&order, sizeof order};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(s->kit_orders, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    struct cmsghdr *h = n == sizeof order ? CMSG_FIRSTHDR(&m) : NULL;
    if (!h || h->cmsg_len != CMSG_LEN(2 * sizeof(int))) {
        close(s->kit_orders);
        s->kit_orders = -1;
        for (unsigned i = 0; i < KITS; i++)
            if (s->kits[i].state == KIT_ORDERED) {
                slot_at(s, s->kits[i].slot)->used = false;
                s->kits[i].state = KIT_NONE;
            }
        return;
    }
    int fds[2];
    memcpy(fds, CMSG_DATA(h), sizeof fds);
    for (unsigned i = 0; i < KITS; i++)
        if (s->kits[i].state == KIT_ORDERED && s->kits[i].slot == order.slot) {
            s->kits[i] = (struct kit){.state = KIT_READY, .slot = order.slot, .users = fds[0], .network = fds[1]};
            return;
        }
    close(fds[0]);
    close(fds[1]);
}

bool kit_take(struct spawner *s, struct kit *out) {
    for (unsigned i = 0; i < KITS; i++)
        if (s->kits[i].state == KIT_READY) {
            *out = s->kits[i];
            s->kits[i].state = KIT_NONE;
            return true;
        }
    *out = (struct kit){.users = -1, .network = -1};
    return false;
}
