/* Requests in, answers out. docs/reference/spawner.md describes the shapes. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "spawner.h"

static bool fits(struct span s, size_t max) { return s.n >= 1 && s.n <= max && !span_has_nul(s); }

/* A name of one path component that cannot climb. */
static bool plain_name(struct span s, size_t max) {
    return fits(s, max) && !memchr(s.p, '/', s.n) && s.p[0] != '.';
}

static bool parse_layers(struct reader *r, struct plan *p) {
    uint32_t n = get_u32(r);
    if (n > LAYERS_MAX) return false;
    for (p->n_layers = 0; p->n_layers < n; p->n_layers++)
        if (!plain_name(p->layers[p->n_layers] = get_bytes(r), 127)) return false;
    return !r->bad;
}

static bool parse_volumes(struct reader *r, struct plan *p, const int *fds, unsigned n_fds) {
    uint32_t n = get_u32(r);
    if (r->bad || n > VOLUMES_MAX || n_fds != n + 1) return false;
    p->listener = fds[0];
    for (p->n_volumes = 0; p->n_volumes < n; p->n_volumes++) {
        struct volume *v = &p->volumes[p->n_volumes];
        v->target = get_bytes(r);
        v->read_only = get_u8(r) != 0;
        v->fd = fds[p->n_volumes + 1];
        if (!fits(v->target, 4095) || v->target.p[0] != '/') return false;
    }
    return true;
}

bool parse_create(struct reader *r, struct plan *p, const int *fds, unsigned n_fds) {
    p->id = get_bytes(r);
    p->hostname = get_bytes(r);
    p->writable = get_bytes(r);
    p->directory = get_bytes(r);
    p->read_only = get_u8(r) != 0;
    p->limits.memory = get_u64(r);
    p->limits.pids = get_u64(r);
    p->limits.cpu_millis = get_u64(r);
    p->open_files = get_u64(r);
    p->deadline = get_u64(r);
    return plain_name(p->id, ID_MAX) && plain_name(p->hostname, 63) && plain_name(p->writable, 127) &&
           fits(p->directory, 4095) && parse_layers(r, p) && parse_volumes(r, p, fds, n_fds) && reader_done(r);
}

void answer(struct spawner *s, uint32_t seq, int err, const char *text, const void *body, size_t n) {
    uint8_t buf[MESSAGE_MAX];
    struct writer w = writer_of(buf, sizeof buf);
    put_u32(&w, seq);
    put_u32(&w, (uint32_t)err);
    if (err)
        put_bytes(&w, text, strlen(text));
    else if (n && n <= sizeof buf - w.len) {
        memcpy(buf + w.len, body, n);
        w.len += n;
    }
    /* An owner that does not read loses answers, not sandboxes: it learns the truth with LIST when it reconnects. */
    if (s->owner >= 0 && send(s->owner, buf, w.len, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) note("answer", "", errno);
}

void tell_ended(struct spawner *s, const struct sandbox *sb, int status) {
    uint8_t buf[256];
    struct writer w = writer_of(buf, sizeof buf);
    put_bytes(&w, sb->id, strlen(sb->id));
    put_u32(&w, (uint32_t)status);
    put_u8(&w, sb->expired);
    put_u64(&w, slot_oom_kills(s, sb->slot));
    answer(s, 0, 0, "", buf, w.len);
}
