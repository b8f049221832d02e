/* Slots: each has its own 65,536 host ids and its own cgroup directories, which are recycled.
 *
 * Id blocks are taken machine-wide by a lock file each, so that two engines never share ids. Memory cgroups are
 * recycled instead of removed: making and removing them is quadratic in what the machine holds. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "spawner.h"

bool write_at(int dir, const char *path, const char *text) {
    int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = write(fd, text, strlen(text));
    int err = errno;
    close(fd);
    errno = err;
    return n >= 0;
}

long read_at(int dir, const char *path, char *out, size_t cap) {
    int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, out, cap - 1);
    close(fd);
    out[n > 0 ? n : 0] = 0;
    return n;
}

static bool write_number(int dir, uint32_t slot, const char *file, uint64_t value) {
    char path[96], text[32];
    snprintf(path, sizeof path, "s%u/%s", slot, file);
    snprintf(text, sizeof text, "%" PRIu64, value);
    return write_at(dir, path, text);
}

/* The number after `key` in a file of "key number" lines; 0 when absent. */
static uint64_t read_keyed(int dir, uint32_t slot, const char *file, const char *key) {
    char path[96], text[1024];
    snprintf(path, sizeof path, "s%u/%s", slot, file);
    if (read_at(dir, path, text, sizeof text) <= 0) return 0;
    for (char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        size_t n = strlen(key);
        if (!strncmp(line, key, n) && line[n] == ' ') return strtoull(line + n + 1, NULL, 10);
    }
    return 0;
}

static unsigned controls_of(const char *spec, size_t n) {
    static const struct { const char *name; unsigned control; } known[] = {
        {"memory", C_MEMORY}, {"pids", C_PIDS}, {"cpu", C_CPU}, {"freezer", C_FREEZE}, {"v2", C_FREEZE}};
    unsigned found = 0;
    for (size_t start = 0; start < n;) {
        size_t end = start;
        while (end < n && spec[end] != '+') end++;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (strlen(known[i].name) == end - start && !memcmp(spec + start, known[i].name, end - start))
                found |= known[i].control;
        start = end + 1;
    }
    return found;
}

/* "memory@/path", "pids@/path", "cpu@/path", "freezer@/path" (v1), "v2@/path", "v2+memory+pids+cpu@/path". */
void cgroups_add(struct spawner *s, const char *spec) {
    const char *at = strchr(spec, '@');
    if (!at || s->n_groups == GROUPS_MAX) die("--cgroup: expected CONTROLS@PATH");
    struct hierarchy *h = &s->groups[s->n_groups++];
    h->v2 = !strncmp(spec, "v2", 2);
    h->controls = controls_of(spec, (size_t)(at - spec));
    h->name = strrchr(at, '/') ? strrchr(at, '/') + 1 : at + 1;
    h->dir = open(at + 1, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (h->dir < 0) die(at + 1);
}

struct slot *slot_at(struct spawner *s, uint32_t slot) {
    for (unsigned b = 0; b < s->n_blocks; b++)
        if (s->blocks[b] == slot / BLOCK_SLOTS) return &s->slots[b * BLOCK_SLOTS + slot % BLOCK_SLOTS];
    return NULL;
}

uint32_t slot_uid(uint32_t slot) { return UID_FIRST + slot * SLOT_IDS; }

static bool block_lock(const struct spawner *s, uint32_t block) {
    char name[16];
    snprintf(name, sizeof name, "%u", block);
    int fd = openat(s->uid_locks, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    if (!flock(fd, LOCK_EX | LOCK_NB)) return true; /* held, with the descriptor, until we end */
    close(fd);
    return false;
}

static bool block_add(struct spawner *s, uint32_t block) {
    if (s->uid_locks >= 0 && !block_lock(s, block)) return false;
    struct slot *slots = realloc(s->slots, (s->n_blocks + 1) * BLOCK_SLOTS * sizeof *slots);
    if (!slots) return false;
    s->slots = slots;
    uint32_t *blocks = realloc(s->blocks, (s->n_blocks + 1) * sizeof *blocks);
    if (!blocks) return false;
    s->blocks = blocks;
    memset(slots + s->n_blocks * BLOCK_SLOTS, 0, BLOCK_SLOTS * sizeof *slots);
    blocks[s->n_blocks++] = block;
    return true;
}

/* Whether a process runs in a slot of this block below one engine's directory. */
static bool runs_below(int engine, uint32_t block) {
    char path[300], text[16];
    DIR *dir = fdopendir(engine);
    bool found = false;
    for (struct dirent *e; dir && !found && (e = readdir(dir));) {
        if (e->d_name[0] != 's' || e->d_name[1] < '0' || e->d_name[1] > '9') continue;
        if (strtoul(e->d_name + 1, NULL, 10) / BLOCK_SLOTS != block) continue;
        snprintf(path, sizeof path, "%s/cgroup.procs", e->d_name);
        found = read_at(engine, path, text, sizeof text) > 0;
    }
    if (dir) closedir(dir);
    else close(engine);
    return found;
}

/* A spawner that was killed holds no lock, but its sandboxes still have the ids: its successor's, and nobody else's. */
static bool block_orphaned(const struct spawner *s, uint32_t block) {
    int up = s->n_groups ? openat(s->groups[s->n_groups - 1].dir, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    DIR *dir = up < 0 ? NULL : fdopendir(up);
    bool found = false;
    for (struct dirent *e; dir && !found && (e = readdir(dir));) {
        if (strncmp(e->d_name, "dsec-", 5)) continue;
        int engine = openat(up, e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        found = engine >= 0 && runs_below(engine, block);
    }
    if (dir) closedir(dir);
    return found;
}

static bool block_find(struct spawner *s) {
    for (uint32_t block = 0; block < BLOCKS_MAX; block++) {
        bool held = false;
        for (unsigned b = 0; b < s->n_blocks; b++) held |= s->blocks[b] == block;
        if (!held && !block_orphaned(s, block) && block_add(s, block)) return true;
    }
    return false;
}

bool slot_take(struct spawner *s, uint32_t slot) {
    struct slot *at = slot_at(s, slot);
    if (!at && (slot / BLOCK_SLOTS >= BLOCKS_MAX || !block_add(s, slot / BLOCK_SLOTS))) return false;
    at = slot_at(s, slot);
    at->used = at->made = true;
    return true;
}

static bool set_limits(const struct spawner *s, uint32_t n, struct slot *slot, const struct limits *l) {
    for (unsigned i = 0; i < s->n_groups; i++) {
        const struct hierarchy *h = &s->groups[i];
        if (h->controls & C_MEMORY && slot->set.memory != l->memory &&
            !write_number(h->dir, n, h->v2 ? "memory.max" : "memory.limit_in_bytes", l->memory))
            return false;
        if (h->controls & C_PIDS && slot->set.pids != l->pids && !write_number(h->dir, n, "pids.max", l->pids))
            return false;
        if (!(h->controls & C_CPU) || slot->set.cpu_millis == l->cpu_millis) continue;
        uint64_t quota = l->cpu_millis * 100; /* of a period of 100,000 µs */
        char text[48], path[64];
        snprintf(path, sizeof path, "s%u/cpu.max", n);
        snprintf(text, sizeof text, "%" PRIu64 " 100000", quota);
        if (h->v2 ? !write_at(h->dir, path, text) : !write_number(h->dir, n, "cpu.cfs_quota_us", quota)) return false;
    }
    slot->set = *l;
    return true;
}

static bool make_groups(const struct spawner *s, uint32_t n) {
    char name[32];
    snprintf(name, sizeof name, "s%u", n);
    for (unsigned i = 0; i < s->n_groups; i++)
        if (mkdirat(s->groups[i].dir, name, 0755) && errno != EEXIST) return false;
    return true;
}

/* Counters that a recycled cgroup carries on; read while nobody waits. */
static void read_bases(const struct spawner *s, uint32_t n, struct slot *slot) {
    for (unsigned i = 0; i < s->n_groups; i++) {
        const struct hierarchy *h = &s->groups[i];
        if (h->controls & C_MEMORY && !h->v2) write_number(h->dir, n, "memory.max_usage_in_bytes", 0);
        if (h->v2) slot->cpu_base = read_keyed(h->dir, n, "cpu.stat", "usage_usec");
    }
    slot->oom_base = slot_oom_kills(s, n);
}

/* Makes the cgroups of a slot that never had any. */
static long slot_prepare(struct spawner *s, unsigned index) {
    struct slot *slot = &s->slots[index];
    uint32_t n = s->blocks[index / BLOCK_SLOTS] * BLOCK_SLOTS + index % BLOCK_SLOTS;
    if (!slot->made) {
        if (!make_groups(s, n)) return -errno;
        read_bases(s, n, slot);
        slot->made = true;
    }
    slot->used = true;
    return n;
}

long slot_reserve(struct spawner *s, const char **step) {
    for (unsigned tries = 0; tries < 2; tries++) {
        *step = "cgroups";
        for (unsigned i = 0; i < s->n_blocks * BLOCK_SLOTS; i++)
            if (!s->slots[i].used) return slot_prepare(s, i);
        *step = "ids: every block is taken";
        if (!block_find(s)) break;
    }
    return -EAGAIN;
}

int slot_limit(struct spawner *s, uint32_t n, const struct limits *limits) {
    struct slot *slot = slot_at(s, n);
    struct limits l = *limits;
    l.pids += slot->shared;
    if (set_limits(s, n, slot, &l)) return 0;
    int err = errno;
    memset(&slot->set, 0, sizeof slot->set); /* half of them are set: none is known */
    return err;
}

/* Whatever is being ended needs the processor to end, and so does what is made ahead in the slot after it: a small share of it would
 * make both wait for periods of 100 ms. */
void slot_hurry(struct spawner *s, uint32_t n) {
    struct slot *slot = slot_at(s, n);
    char path[64];
    if (!slot || !slot->set.cpu_millis || slot->set.cpu_millis >= HURRY_BELOW) return;
    for (unsigned i = 0; i < s->n_groups; i++) {
        const struct hierarchy *h = &s->groups[i];
        if (!(h->controls & C_CPU)) continue;
        snprintf(path, sizeof path, h->v2 ? "s%u/cpu.max" : "s%u/cpu.cfs_quota_us", n);
        write_at(h->dir, path, h->v2 ? "max 100000" : "-1");
    }
    slot->set.cpu_millis = 0; /* the next sandbox's own is written again */
}

/* A process of ours lives in the slot's cgroups: it does not count against the sandbox. */
void slot_share(struct spawner *s, uint32_t n, bool shared) {
    struct slot *slot = slot_at(s, n);
    struct limits l = slot->set;
    if (slot->shared && !shared && l.pids) {
        l.pids -= 1;
        if (!set_limits(s, n, slot, &l)) memset(&slot->set, 0, sizeof slot->set);
    }
    slot->shared = shared;
}

void slot_release(struct spawner *s, uint32_t n, bool frozen) {
    struct slot *slot = slot_at(s, n);
    if (!slot) return;
    if (frozen) slot_freeze(s, n, false);
    read_bases(s, n, slot);
    slot->used = zygote_keeps(s, n);
}

int slot_v2_dir(const struct spawner *s, uint32_t slot) {
    char name[32];
    snprintf(name, sizeof name, "s%u", slot);
    for (unsigned i = 0; i < s->n_groups; i++)
        if (s->groups[i].v2) return openat(s->groups[i].dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return -1;
}

int slot_join_v1(const struct spawner *s, uint32_t slot) {
    for (unsigned i = 0; i < s->n_groups; i++)
        if (!s->groups[i].v2 && !write_number(s->groups[i].dir, slot, "cgroup.procs", 0)) return errno;
    return 0;
}

int slot_freeze(const struct spawner *s, uint32_t slot, bool frozen) {
    for (unsigned i = 0; i < s->n_groups; i++) {
        const struct hierarchy *h = &s->groups[i];
        if (h->v2) return write_number(h->dir, slot, "cgroup.freeze", frozen) ? 0 : errno;
        char path[64];
        snprintf(path, sizeof path, "s%u/freezer.state", slot);
        if (h->controls & C_FREEZE) return write_at(h->dir, path, frozen ? "FROZEN" : "THAWED") ? 0 : errno;
    }
    return ENOTSUP;
}

uint64_t slot_oom_kills(const struct spawner *s, uint32_t slot) {
    for (unsigned i = 0; i < s->n_groups; i++)
        if (s->groups[i].controls & C_MEMORY)
            return read_keyed(s->groups[i].dir, slot, s->groups[i].v2 ? "memory.events" : "memory.oom_control", "oom_kill");
    return 0;
}

/* A process that was reaped may hold its group for a moment more: until it has left the processor for the last time. */
void group_remove(int dir, const char *name) {
    for (int tries = 0; unlinkat(dir, name, AT_REMOVEDIR); tries++) {
        if (errno == ENOENT) return;
        if (errno != EBUSY || tries == 1000) return note("remove cgroup", name, errno);
        usleep(1000);
    }
}

void slots_remove_all(struct spawner *s) {
    for (unsigned i = 0; i < s->n_blocks * BLOCK_SLOTS; i++) {
        if (!s->slots[i].made) continue;
        char name[32];
        snprintf(name, sizeof name, "s%u", s->blocks[i / BLOCK_SLOTS] * BLOCK_SLOTS + i % BLOCK_SLOTS);
        for (unsigned g = 0; g < s->n_groups; g++) group_remove(s->groups[g].dir, name);
    }
}
