/* The sandboxes, found by id and by pid. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "spawner.h"

#define BUCKETS 4096u

static unsigned id_bucket(const uint8_t *p, size_t n) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 16777619u;
    return h % BUCKETS;
}

static unsigned pid_bucket(pid_t pid) { return (unsigned)pid % BUCKETS; }

static void ready(struct spawner *s) {
    if (s->by_id) return;
    s->by_id = calloc(BUCKETS, sizeof *s->by_id);
    s->by_pid = calloc(BUCKETS, sizeof *s->by_pid);
    if (!s->by_id || !s->by_pid) die("table");
    s->n_buckets = BUCKETS;
}

struct sandbox *table_add(struct spawner *s, struct span id, pid_t pid) {
    ready(s);
    struct sandbox *sb = calloc(1, sizeof *sb);
    if (!sb) die("table");
    memcpy(sb->id, id.p, id.n); /* parse checked id.n <= ID_MAX */
    sb->pid = pid;
    sb->pidfd = sb->status = -1;
    unsigned a = id_bucket(id.p, id.n), b = pid_bucket(pid);
    sb->next_id = s->by_id[a];
    s->by_id[a] = sb;
    sb->next_pid = s->by_pid[b];
    s->by_pid[b] = sb;
    s->n_sandboxes++;
    return sb;
}

struct sandbox *table_by_id(struct spawner *s, struct span id) {
    ready(s);
    for (struct sandbox *sb = s->by_id[id_bucket(id.p, id.n)]; sb; sb = sb->next_id)
        if (strlen(sb->id) == id.n && !memcmp(sb->id, id.p, id.n)) return sb;
    return NULL;
}

struct sandbox *table_by_pid(struct spawner *s, pid_t pid) {
    ready(s);
    for (struct sandbox *sb = s->by_pid[pid_bucket(pid)]; sb; sb = sb->next_pid)
        if (sb->pid == pid) return sb;
    return NULL;
}

void table_remove(struct spawner *s, struct sandbox *sb) {
    struct sandbox **at = &s->by_id[id_bucket((uint8_t *)sb->id, strlen(sb->id))];
    while (*at != sb) at = &(*at)->next_id;
    *at = sb->next_id;
    at = &s->by_pid[pid_bucket(sb->pid)];
    while (*at != sb) at = &(*at)->next_pid;
    *at = sb->next_pid;
    if (sb->pidfd >= 0) unwatch(s, sb->pidfd);
    if (sb->status >= 0) unwatch(s, sb->status);
    s->n_sandboxes--;
    free(sb);
}

void table_each(struct spawner *s, void (*each)(struct spawner *, struct sandbox *, void *), void *arg) {
    ready(s);
    for (unsigned i = 0; i < s->n_buckets; i++)
        for (struct sandbox *sb = s->by_id[i], *next; sb; sb = next) {
            next = sb->next_id;
            each(s, sb, arg);
        }
}
