/* What a process gives up on its way in. Each returns 0, or -1 with errno. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seccomp_tables.h"
#include "spawner.h"

int confine_capabilities(uint64_t keep) {
    for (int cap = 0; cap < 64; cap++)
        if (!(keep >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0)) {
            if (errno == EINVAL) break; /* past the last one of this kernel */
            if (errno != EPERM || keep) return -1;
        }
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    memset(data, 0, sizeof data);
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted = (uint32_t)(keep >> (32 * i));
    if (syscall(SYS_capset, &head, data)) return -1;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

int confine_seccomp(enum level level) {
    struct sock_fprog container = {.len = DSEC_SECCOMP_CONTAINER_LEN, .filter = (struct sock_filter *)DSEC_SECCOMP_CONTAINER};
    struct sock_fprog process = {.len = DSEC_SECCOMP_PROCESS_LEN, .filter = (struct sock_filter *)DSEC_SECCOMP_PROCESS};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, level == LEVEL_CONTAINER ? &container : &process);
}

int confine_rlimits(uint64_t open_files) {
    static const struct rlimit no_core = {0, 0};
    if (setrlimit(RLIMIT_CORE, &no_core)) return -1;
    /* Init needs room for its connections and pipes however little its commands get: it gives each command its own limit. */
    rlim_t most = open_files > INIT_FILES ? open_files : INIT_FILES;
    struct rlimit now;
    if (getrlimit(RLIMIT_NOFILE, &now)) return -1;
    /* Without CAP_SYS_RESOURCE the hard limit can only fall: what is above it is not had, and not an error. */
    if (most > now.rlim_max) most = now.rlim_max;
    struct rlimit want = {most, most};
    return setrlimit(RLIMIT_NOFILE, &want);
}

#define FS_READ (LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define FS_V1 ((LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1)
#define FS_REFER (1ULL << 13)
#define FS_TRUNCATE (1ULL << 14)
#define FS_IOCTL_DEV (1ULL << 15)

struct ruleset { /* as of Landlock ABI 6; older kernels take the shorter form */
    uint64_t fs, net, scoped;
};

/* A path that does not exist here needs no rule, unless it must. Rights that only directories have are left out for files. */
static int allow_below(int ruleset, const char *path, uint64_t access, bool must) {
    struct landlock_path_beneath_attr rule = {.allowed_access = access};
    rule.parent_fd = open(path, O_PATH | O_CLOEXEC);
    if (rule.parent_fd < 0) return must ? -1 : 0;
    struct stat st;
    int r = fstat(rule.parent_fd, &st);
    if (!r && !S_ISDIR(st.st_mode))
        rule.allowed_access &= LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE |
                               LANDLOCK_ACCESS_FS_WRITE_FILE | FS_TRUNCATE | FS_IOCTL_DEV;
    if (!r) r = (int)syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
    close(rule.parent_fd);
    return r;
}

/* Every right on files that this kernel can take away; 0: it cannot. */
static uint64_t all_rights(long abi) {
    if (abi < 1) return 0;
    return FS_V1 | (abi >= 2 ? FS_REFER : 0) | (abi >= 3 ? FS_TRUNCATE : 0) | (abi >= 5 ? FS_IOCTL_DEV : 0);
}

static long landlock_abi(void) { return syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION); }

int landlock_rules(const struct config *config) {
    static const char *const devices[] = {"/dev/null", "/dev/zero",    "/dev/full", "/dev/random",
                                          "/dev/tty",  "/dev/urandom", "/dev/ptmx", "/dev/pts"};
    long abi = landlock_abi();
    uint64_t all = all_rights(abi), device = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE | (all & (FS_TRUNCATE | FS_IOCTL_DEV));
    struct ruleset rules = {.fs = all, .scoped = abi >= 6 ? 3 : 0}; /* abstract sockets and signals */
    int ruleset = all ? (int)syscall(SYS_landlock_create_ruleset, &rules, abi >= 6 ? sizeof rules : sizeof rules.fs, 0) : -1;
    if (ruleset < 0) return -1;
    for (unsigned i = 0; i < config->n_readable; i++)
        if (allow_below(ruleset, config->readable[i], FS_READ, false)) return -1;
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (allow_below(ruleset, devices[i], device, false)) return -1;
    return ruleset;
}

int landlock_enter(int ruleset, struct span directory) {
    char path[4096];
    uint64_t own = all_rights(landlock_abi()) & ~(uint64_t)(LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK);
    memcpy(path, directory.p, directory.n);
    path[directory.n] = 0;
    if (allow_below(ruleset, path, own, true)) return -1;
    if (syscall(SYS_landlock_restrict_self, ruleset, 0)) return -1;
    return close(ruleset);
}
