/* The spawner: makes sandboxes of one level, holds their deadlines, ends them, and reports what ended.
 *
 * One thread, one epoll loop. It parses requests of its owner (SEQPACKET, checked by SO_PEERCRED), clones, and leaves all set-up to the child,
 * which works through an ordered list of operations and dies on the first doubt. It keeps no descriptor per running
 * sandbox, so that cloning stays cheap when thousands are held. */
#ifndef DSEC_SPAWNER_H
#define DSEC_SPAWNER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "../common/codec.h"

#define SPAWNER_VERSION 2u
#define ID_MAX 63
#define MESSAGE_MAX 65536u
#define FDS_MAX 64
#define LAYERS_MAX 64
#define VOLUMES_MAX 32
#define READABLE_MAX 32
#define GROUPS_MAX 8
#define SLOT_IDS 65536u
#define BLOCK_SLOTS 256u
#define UID_FIRST 0x40000000u
#define BLOCKS_MAX 190u
#define WAITERS_MAX 8
#define INIT_FILES 4096u
#define ZYGOTES 16
#define SEEDS 4
#define STRAYS 32
#define HURRY_BELOW 1000 /* thousandths of a CPU */
#define URGENT (-10) /* the nice value of what somebody waits for */

enum level { LEVEL_CONTAINER, LEVEL_PROCESS };

enum op {
    OP_HELLO = 1,
    OP_TREE,
    OP_CREATE,
    OP_DESTROY,
    OP_FREEZE,
    OP_DEADLINE,
    OP_LIST,
    OP_SHUTDOWN,
    OP_UNTREE,
};

/* What a cgroup directory of ours controls. */
enum control { C_MEMORY = 1, C_PIDS = 2, C_CPU = 4, C_FREEZE = 8 };

struct hierarchy {
    int dir;         /* our parent directory in it */
    const char *name; /* of that directory */
    bool v2;
    unsigned controls;
};

struct limits {
    uint64_t memory, pids, cpu_millis;
};

/* One place for a sandbox: a range of ids and recycled cgroup directories. */
struct slot {
    bool used, made, shared; /* shared: a zygote is in its cgroups */
    struct limits set;
    uint64_t oom_base, cpu_base; /* counters that a recycled cgroup had already */
};

struct volume {
    struct span target;
    int fd; /* a detached mount, of the owner */
    bool read_only;
};

/* A process that has joined the cgroups of one slot and forks its seeds; see zygote.c. */
struct zygote {
    pid_t pid;  /* 0: none */
    uint32_t slot;
    int end;    /* our end of its socket */
    bool joined, busy; /* busy: a sandbox runs in its slot */
    bool ordered;      /* a seed, whose pid it has not told yet */
    uint64_t late_at;  /* what is awaited of it or of its seed is late then: CLOCK_BOOTTIME ns, 0: nothing is */
    uint64_t since;    /* busy since: CLOCK_BOOTTIME ns */
    pid_t seed; /* 0: none; it waits for a sandbox once it is ready */
    int seed_end;
    bool ready;
};

/* A parsed CREATE. Spans point into the message. */
struct plan {
    struct span id, hostname, writable, directory;
    bool read_only;
    struct limits limits;
    uint64_t open_files, deadline;
    struct span layers[LAYERS_MAX];
    unsigned n_layers;
    struct volume volumes[VOLUMES_MAX];
    unsigned n_volumes;
    int listener;
};

enum state { S_CREATING, S_RUNNING, S_DYING };

struct sandbox {
    char id[ID_MAX + 1];
    enum state state;
    pid_t pid;
    int pidfd;     /* -1 for our own children, whose pid cannot be reused before we reap it */
    int status;    /* read end of the set-up report while S_CREATING, else -1 */
    uint32_t slot;
    uint64_t deadline; /* CLOCK_BOOTTIME ns, 0 none */
    uint64_t late_at;  /* a seed that has not become init by then never will: likewise */
    bool frozen, expired, failed;
    bool lingers; /* its init is dead, and other processes of it are not */
    uint32_t create_seq;
    uint32_t waiters[WAITERS_MAX];
    unsigned n_waiters;
    int fail_errno;
    char fail_step[48];
    struct sandbox *next_id, *next_pid; /* hash chains */
};

struct config {
    enum level level;
    bool durable;
    const char *state;     /* directory, where the empty root is mounted for a moment */
    const char *init_path;
    const char *uids;      /* directory of the lock files of id blocks, or NULL */
    const char *readable[READABLE_MAX]; /* paths that every sandbox of level `process` may read */
    unsigned n_readable;
};

struct spawner {
    struct config config;
    int listener, lifeline, owner, epoll, timer, signals;
    int init_exe, null, proc, uid_locks;
    int blank; /* mount namespace that every sandbox's is a copy of */
    int world; /* our own, in which layers are mounted */
    bool root, stopping, owned; /* owned: an engine has been here */
    uint32_t stop_seq;
    struct hierarchy groups[GROUPS_MAX];
    unsigned n_groups;
    struct slot *slots; /* BLOCK_SLOTS for each held block */
    uint32_t *blocks;   /* number of each held block */
    unsigned n_blocks;
    struct sandbox **by_id, **by_pid;
    unsigned n_buckets, n_sandboxes;
    int oom_adj; /* what init got */
    pid_t pid;   /* our own */
    struct zygote zygotes[ZYGOTES];
    uint64_t refill_at;    /* CLOCK_BOOTTIME ns, 0: nothing is to be made */
    uint64_t barren_until; /* none is made before */
    pid_t strays[STRAYS]; /* children that were reaped while the pid of a seed was not known yet */
    unsigned n_strays;
};

/* report.c */
_Noreturn void die(const char *what);
void note(const char *what, const char *name, int err);

/* message.c: parsing and answers */
bool parse_create(struct reader *r, struct plan *p, const int *fds, unsigned n_fds);
void answer(struct spawner *s, uint32_t seq, int err, const char *text, const void *body, size_t n);
void tell_ended(struct spawner *s, const struct sandbox *sb, int status);

/* table.c */
struct sandbox *table_add(struct spawner *s, struct span id, pid_t pid);
struct sandbox *table_by_id(struct spawner *s, struct span id);
struct sandbox *table_by_pid(struct spawner *s, pid_t pid);
void table_remove(struct spawner *s, struct sandbox *sb);
/* Calls `each` for every sandbox; `each` may remove the one it is given. */
void table_each(struct spawner *s, void (*each)(struct spawner *, struct sandbox *, void *), void *arg);

/* slots.c: id blocks and cgroups */
void cgroups_add(struct spawner *s, const char *spec);
long slot_reserve(struct spawner *s, const char **step); /* a free slot, now used, or -errno */
int slot_limit(struct spawner *s, uint32_t slot, const struct limits *limits); /* 0 or errno */
bool slot_take(struct spawner *s, uint32_t slot); /* an adopted one; false when its block is somebody else's */
void slot_share(struct spawner *s, uint32_t slot, bool shared);
void slot_hurry(struct spawner *s, uint32_t slot); /* no CPU limit any more: its sandbox is being ended */
void slot_release(struct spawner *s, uint32_t slot, bool frozen);
struct slot *slot_at(struct spawner *s, uint32_t slot);
uint32_t slot_uid(uint32_t slot);
int slot_v2_dir(const struct spawner *s, uint32_t slot); /* for CLONE_INTO_CGROUP, or -1 */
int slot_join_v1(const struct spawner *s, uint32_t slot); /* the calling process; 0 or errno */
int slot_freeze(const struct spawner *s, uint32_t slot, bool frozen);
uint64_t slot_oom_kills(const struct spawner *s, uint32_t slot);
void group_remove(int dir, const char *name);
void slots_remove_all(struct spawner *s);

/* world.c: the spawner's own surroundings */
void world_enter(struct spawner *s);
int world_attach(const char *name, int fd); /* 0 or errno */
int world_detach(const char *name);         /* 0 or errno; "": all but `rw` */

/* names.c */
int network_enter(void);
int users_make(int pids, int proc, uint32_t uid);

/* passing.c */
ssize_t receive_fds(int sock, void *buf, size_t cap, int *fds, unsigned *n, int flags);
void keep_only(int *fds, size_t n); /* closes all others above 2 */
bool send_fds(int sock, const void *body, size_t size, const int *fds, unsigned n); /* at once, or false */

/* A CREATE as it came. */
struct request {
    const uint8_t *body;
    size_t n;
    const int *fds;
    unsigned n_fds;
};

/* A process on its way to being init. */
struct sprout {
    pid_t pid;
    uint32_t slot;
    int status; /* our end of its report */
};

/* zygote.c */
pid_t clone_into(const struct spawner *s, uint32_t slot, uint64_t flags);
void seeds_refill(struct spawner *s);
void seeds_refill_soon(struct spawner *s);
int seeds_wait_ms(const struct spawner *s); /* until there is something to make, or -1 */
void zygotes_news(struct spawner *s, pid_t pid);
void seeds_distrust(struct spawner *s);
void child_ended(struct spawner *s, pid_t pid);
bool zygote_keeps(struct spawner *s, uint32_t slot);
bool seed_take(struct spawner *s, const struct request *q, const struct limits *limits, struct sprout *out);
void zygotes_stop(struct spawner *s);

/* child.c: what a new process does until it is init. Never return. */
_Noreturn void child_direct(const struct spawner *s, uint32_t slot, const struct plan *p, int report);
_Noreturn void child_seed(const struct spawner *s, uint32_t slot, int users, int report);

/* container.c: a detached mount, with pairs of options, or -1 */
int make_mount(const char *type, const char *const *options, unsigned attributes);

/* container.c, process.c: the ordered operations of each level */
struct child;
struct operation {
    const char *name;
    int (*run)(struct child *c); /* 0, or -1 with errno */
};
struct child {
    const struct spawner *s;
    const struct plan *p; /* NULL while it prepares */
    uint32_t slot, uid;
    bool joined;   /* the version 1 cgroups, by birth */
    bool attached; /* the layers, in a mount namespace that is no more */
    int users, mounts; /* namespaces: of ids; of mounts, its own */
    int proc, dev, root, writable;
    int ruleset; /* of Landlock: everything but its own directory */
    int layers[LAYERS_MAX];
};
extern const struct operation container_prepare[], container_finish[], process_prepare[], process_finish[];

/* confine.c: shared operations */
int confine_capabilities(uint64_t keep);
int confine_seccomp(enum level level);
int landlock_rules(const struct config *config); /* a rule set, or -1 */
int landlock_enter(int ruleset, struct span directory);
int confine_rlimits(uint64_t open_files);

/* adopt.c */
void adopt_running(struct spawner *s);

/* process.c: when init of a sandbox of level `process` is dead, everything it left ends too */
bool process_end_all(struct spawner *s, uint32_t slot); /* false: some do not die yet */

/* loop.c */
enum source { FROM_LISTENER, FROM_LIFELINE, FROM_OWNER, FROM_TIMER, FROM_SIGNALS, FROM_STATUS, FROM_PIDFD, FROM_ZYGOTE };
void listen_to(struct spawner *s, int fd, enum source source, pid_t pid);
void watch_pidfd(struct spawner *s, const struct sandbox *sb);
void unwatch(const struct spawner *s, int fd); /* and closes it */
_Noreturn void loop_run(struct spawner *s);
void rearm(struct spawner *s, uint64_t deadline);
uint64_t boottime_ns(void);
bool write_at(int dir, const char *path, const char *text);
long read_at(int dir, const char *path, char *out, size_t cap);

#endif
