/* Namespaces that depend on nothing but the slot. */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
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

/* The caller moves into a new network namespace with `lo` up. */
int network_enter(void) { return unshare(CLONE_NEWNET) || loopback_up() ? -1 : 0; }

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
int users_make(int pids, int proc, uint32_t uid) {
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
