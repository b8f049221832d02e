/* Messages with descriptors, and which descriptors are kept. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spawner.h"

/* One message; its descriptors, at most *n of them, are the caller's. As recvmsg; a message that was cut, in bytes or in
 * descriptors, is EMSGSIZE. */
ssize_t receive_fds(int sock, void *buf, size_t cap, int *fds, unsigned *n, int flags) {
    char control[CMSG_SPACE(FDS_MAX * sizeof(int))];
    struct iovec part = {buf, cap};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    unsigned most = *n;
    *n = 0;
    ssize_t got = recvmsg(sock, &m, MSG_CMSG_CLOEXEC | flags);
    if (got < 0) return -1;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
        unsigned count = (unsigned)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (unsigned i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
            if (*n < most) fds[(*n)++] = fd;
            else close(fd), m.msg_flags |= MSG_CTRUNC;
        }
    }
    if (!(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) return got;
    while (*n) close(fds[--*n]);
    errno = EMSGSIZE;
    return -1;
}

bool send_fds(int sock, const void *body, size_t size, const int *fds, unsigned n) {
    char control[CMSG_SPACE(FDS_MAX * sizeof(int))] __attribute__((aligned(8)));
    struct iovec part = {(void *)(uintptr_t)body, size};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = CMSG_SPACE(n * sizeof(int))};
    memset(control, 0, sizeof control);
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(h), fds, n * sizeof(int));
    return sendmsg(sock, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size;
}

static int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* Closes every descriptor but 0 to 2 and these. */
void keep_only(int *fds, size_t n) {
    unsigned next = 3;
    qsort(fds, n, sizeof *fds, by_number);
    for (size_t i = 0; i < n; i++) {
        if (fds[i] < (int)next) continue; /* -1, or twice */
        if ((unsigned)fds[i] > next) syscall(SYS_close_range, next, (unsigned)fds[i] - 1, 0);
        next = (unsigned)fds[i] + 1;
    }
    syscall(SYS_close_range, next, ~0u, 0);
}
