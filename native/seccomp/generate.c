/*
 * Turns the policies beside this file into native/spawner/seccomp_tables.h. Run through scripts/seccomp_tables.py.
 *
 *   generate DIR           prints the header for DIR/container.policy and DIR/process.policy
 *   generate --lists DIR   prints `policy decision name x86-64-number arm64-number` for every name (for tests)
 *
 * A table ends the process on any other architecture, then finds the call in a binary tree over *runs* of numbers with
 * one verdict; at a call that is refused by argument, the refusals are the leaf. libseccomp knows the numbers. It could
 * write the tree too, but with a leaf for every call: five times as long, and loading is paid for by every sandbox.
 */
#include <ctype.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <seccomp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <asm/ioctls.h>
#include <linux/netlink.h>

enum { MAX_NAMES = 1024, MAX_REFUSALS = 64, MAX_CONDITIONS = 3, MAX_VALUES = 16, MAX_CODE = 1024, MAX_JUMP = 255 };
enum { NUMBERS = 1024, MAX_RUNS = NUMBERS + 2 };

enum decision { ALLOW, DENY, ABSENT };
enum test { IS, IS_NOT, HAS };

struct entry {
    char name[40];
    enum decision decision;
    int changed;
};

struct condition {
    unsigned arg;
    uint32_t mask;
    enum test test;
    uint32_t values[MAX_VALUES];
    size_t count;
};

struct refusal {
    char name[40];
    uint32_t error;
    struct condition conditions[MAX_CONDITIONS];
    size_t count;
};

struct policy {
    struct entry entries[MAX_NAMES];
    size_t entry_count;
    struct refusal refusals[MAX_REFUSALS];
    size_t refusal_count;
};

struct machine {
    const char *macro;
    uint32_t token;
    uint32_t audit;
    uint32_t foreign; /* numbers from here on belong to another ABI of the same architecture; 0: none do */
};

/* What a number gets: a return value, or the refusals of a name before SECCOMP_RET_ALLOW. */
struct verdict {
    uint32_t value;
    const char *refusals;
};

struct run {
    uint32_t start;
    struct verdict verdict;
};

struct runs {
    struct run at[MAX_RUNS];
    size_t count;
};

struct code {
    struct sock_filter at[MAX_CODE];
    size_t len;
};

static const struct machine MACHINES[] = {
    {"__x86_64__", SCMP_ARCH_X86_64, AUDIT_ARCH_X86_64, 0x40000000 /* x32 */},
    {"__aarch64__", SCMP_ARCH_AARCH64, AUDIT_ARCH_AARCH64, 0},
};

/* The same number on both architectures, each of them. */
static const struct { const char *name; uint32_t value; } CONSTANTS[] = {
    {"EPERM", EPERM}, {"EAFNOSUPPORT", EAFNOSUPPORT}, {"EPROTONOSUPPORT", EPROTONOSUPPORT},
    {"CLONE_NEWNS", CLONE_NEWNS}, {"CLONE_NEWCGROUP", CLONE_NEWCGROUP}, {"CLONE_NEWUTS", CLONE_NEWUTS},
    {"CLONE_NEWIPC", CLONE_NEWIPC}, {"CLONE_NEWUSER", CLONE_NEWUSER}, {"CLONE_NEWPID", CLONE_NEWPID},
    {"CLONE_NEWNET", CLONE_NEWNET}, {"TIOCSTI", TIOCSTI}, {"TIOCLINUX", TIOCLINUX}, {"TIOCSETD", TIOCSETD},
    {"FICLONE", FICLONE}, {"FICLONERANGE", FICLONERANGE}, {"FIDEDUPERANGE", FIDEDUPERANGE},
    {"AF_UNIX", AF_UNIX}, {"AF_INET", AF_INET}, {"AF_INET6", AF_INET6}, {"AF_NETLINK", AF_NETLINK},
    {"NETLINK_ROUTE", NETLINK_ROUTE}, {"SOCK_TYPE_MASK", 0xf}, {"SOCK_STREAM", SOCK_STREAM},
    {"SOCK_DGRAM", SOCK_DGRAM}, {"SOCK_RAW", SOCK_RAW}, {"SOCK_SEQPACKET", SOCK_SEQPACKET},
    {"IPPROTO_IP", IPPROTO_IP}, {"IPPROTO_ICMP", IPPROTO_ICMP}, {"IPPROTO_TCP", IPPROTO_TCP},
    {"IPPROTO_UDP", IPPROTO_UDP}, {"IPPROTO_ICMPV6", IPPROTO_ICMPV6},
};

static const char *file_name = "";
static int line_number;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file_name, line_number);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

/* --- reading a policy */

static uint32_t constant(const char *text) {
    for (size_t i = 0; i < sizeof CONSTANTS / sizeof *CONSTANTS; i++)
        if (!strcmp(CONSTANTS[i].name, text)) return CONSTANTS[i].value;
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 0);
    if (!isdigit((unsigned char)*text) || *end || errno || value > UINT32_MAX) die("unknown constant '%s'", text);
    return (uint32_t)value;
}

static struct entry *find(struct policy *policy, const char *name) {
    for (size_t i = 0; i < policy->entry_count; i++)
        if (!strcmp(policy->entries[i].name, name)) return &policy->entries[i];
    return NULL;
}

static void copy_name(char *to, size_t size, const char *name) {
    if ((size_t)snprintf(to, size, "%s", name) >= size) die("name too long: '%s'", name);
}

/* Known to some architecture that we have: a name that is spelt wrong would otherwise be silently refused. */
static int known(const char *name) {
    for (size_t i = 0; i < sizeof MACHINES / sizeof *MACHINES; i++)
        if (seccomp_syscall_resolve_name_arch(MACHINES[i].token, name) >= 0) return 1;
    return 0;
}

static void decide(struct policy *policy, const char *name, enum decision decision) {
    if (!known(name)) die("unknown system call '%s'", name);
    if (find(policy, name)) die("'%s' is decided twice", name);
    if (policy->entry_count == MAX_NAMES) die("too many names");
    struct entry *entry = &policy->entries[policy->entry_count++];
    copy_name(entry->name, sizeof entry->name, name);
    entry->decision = decision;
}

static void change(struct policy *policy, const char *name, enum decision decision) {
    struct entry *entry = find(policy, name);
    if (!entry) die("'%s' is not in the base", name);
    if (entry->changed || entry->decision == decision) die("'%s' is changed twice, or to what it was", name);
    entry->decision = decision;
    entry->changed = 1;
}

static enum decision parse_decision(const char *word) {
    if (word && !strcmp(word, "allow")) return ALLOW;
    if (word && !strcmp(word, "deny")) return DENY;
    if (word && !strcmp(word, "absent")) return ABSENT;
    die("expected allow, deny or absent, not '%s'", word ? word : "");
}

static const char *next_word(void) {
    const char *word = strtok(NULL, " \t\n");
    if (!word) die("the line ends too early");
    return word;
}

static void parse_argument(struct condition *condition, const char *word) {
    if (strncmp(word, "arg", 3) || word[3] < '0' || word[3] > '5' || (word[4] && word[4] != '&'))
        die("expected argN or argN&MASK, not '%s'", word);
    condition->arg = (unsigned)(word[3] - '0');
    condition->mask = word[4] ? constant(word + 5) : UINT32_MAX;
}

static void parse_test(struct condition *condition, const char *word) {
    if (!strcmp(word, "is")) condition->test = IS;
    else if (!strcmp(word, "is-not")) condition->test = IS_NOT;
    else if (!strcmp(word, "has")) condition->test = HAS;
    else die("expected is, is-not or has, not '%s'", word);
}

static void parse_values(struct condition *condition, const char *word) {
    char copy[512];
    copy_name(copy, sizeof copy, word);
    char *rest = copy;
    for (char *value; (value = strsep(&rest, "|"));) {
        if (condition->count == MAX_VALUES) die("too many values");
        condition->values[condition->count++] = constant(value);
    }
}

static void parse_refusal(struct policy *policy) {
    if (policy->refusal_count == MAX_REFUSALS) die("too many refusals");
    struct refusal *refusal = &policy->refusals[policy->refusal_count++];
    const char *name = next_word();
    struct entry *entry = find(policy, name);
    if (!entry || entry->decision != ALLOW) die("'%s' is not allowed, nothing to refuse", name);
    copy_name(refusal->name, sizeof refusal->name, name);
    refusal->error = constant(next_word());
    for (const char *word = "and"; word; word = strtok(NULL, " \t\n")) {
        if (strcmp(word, "and")) die("expected and, not '%s'", word);
        if (refusal->count == MAX_CONDITIONS) die("too many conditions");
        struct condition *condition = &refusal->conditions[refusal->count++];
        parse_argument(condition, next_word());
        parse_test(condition, next_word());
        parse_values(condition, next_word());
    }
}

static void parse_line(struct policy *policy, char *line) {
    line[strcspn(line, "#")] = 0;
    const char *word = strtok(line, " \t\n");
    if (!word || !strcmp(word, "base")) return; /* base: see parse */
    if (!strcmp(word, "refuse")) {
        parse_refusal(policy);
        return;
    }
    int changing = !strcmp(word, "change");
    enum decision decision = parse_decision(changing ? next_word() : word);
    for (const char *name; (name = strtok(NULL, " \t\n"));)
        (changing ? change : decide)(policy, name, decision);
}

static void parse(struct policy *policy, const char *directory, const char *name);

/* A `base NAME` line anywhere means: begin with that policy. */
static void parse_base(struct policy *policy, const char *directory, FILE *file) {
    char line[512], base[64];
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "base %63s", base) == 1) parse(policy, directory, base);
    rewind(file);
}

static void parse(struct policy *policy, const char *directory, const char *name) {
    char path[512], line[512];
    if (strchr(name, '/')) die("a policy is a file of the same directory, not '%s'", name);
    if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) >= sizeof path) die("path too long");
    FILE *file = fopen(path, "re");
    if (!file) die("%s: %s", path, strerror(errno));
    parse_base(policy, directory, file);
    file_name = name;
    line_number = 0;
    while (fgets(line, sizeof line, file)) {
        line_number++;
        if (!strchr(line, '\n')) die("line too long, or no newline at the end");
        parse_line(policy, line);
    }
    if (ferror(file)) die("read error");
    fclose(file);
}

/* --- writing code */

static size_t emit(struct code *code, uint16_t op, uint32_t k) {
    if (code->len == MAX_CODE) die("the program is too long");
    code->at[code->len] = (struct sock_filter){.code = op, .k = k};
    return code->len++;
}

static uint8_t distance(size_t from, size_t to) {
    size_t jump = to - from - 1;
    if (to <= from || jump > MAX_JUMP) die("a jump is too long");
    return (uint8_t)jump;
}

/* The jumps of one refusal that mean "it does not apply"; both ways of an instruction can be among them. */
struct exits {
    size_t at[MAX_CONDITIONS * MAX_VALUES];
    int on_true[MAX_CONDITIONS * MAX_VALUES];
    size_t count;
};

static void exit_when(struct exits *exits, size_t at, int on_true) {
    exits->at[exits->count] = at;
    exits->on_true[exits->count++] = on_true;
}

/* Both architectures are little-endian: the low half of an argument comes first. */
static void write_condition(struct code *code, const struct condition *condition, struct exits *exits) {
    emit(code, BPF_LD | BPF_W | BPF_ABS, (uint32_t)(offsetof(struct seccomp_data, args) + 8 * condition->arg));
    if (condition->mask != UINT32_MAX) emit(code, BPF_ALU | BPF_AND | BPF_K, condition->mask);
    if (condition->test == HAS) {
        uint32_t bits = 0;
        for (size_t i = 0; i < condition->count; i++) bits |= condition->values[i];
        exit_when(exits, emit(code, BPF_JMP | BPF_JSET | BPF_K, bits), 0);
        return;
    }
    size_t first = code->len, end = first + condition->count;
    for (size_t i = 0; i < condition->count; i++) {
        size_t at = emit(code, BPF_JMP | BPF_JEQ | BPF_K, condition->values[i]);
        if (condition->test == IS_NOT) exit_when(exits, at, 1);
        else code->at[at].jt = distance(at, end);
    }
    if (condition->test == IS) exit_when(exits, end - 1, 0);
}

static void write_refusal(struct code *code, const struct refusal *refusal) {
    struct exits exits = {.count = 0};
    for (size_t i = 0; i < refusal->count; i++) write_condition(code, &refusal->conditions[i], &exits);
    emit(code, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | refusal->error);
    for (size_t i = 0; i < exits.count; i++) {
        struct sock_filter *jump = &code->at[exits.at[i]];
        *(exits.on_true[i] ? &jump->jt : &jump->jf) = distance(exits.at[i], code->len);
    }
}

static void write_leaf(struct code *code, const struct policy *policy, struct verdict verdict) {
    for (size_t i = 0; verdict.refusals && i < policy->refusal_count; i++)
        if (!strcmp(policy->refusals[i].name, verdict.refusals)) write_refusal(code, &policy->refusals[i]);
    emit(code, BPF_RET | BPF_K, verdict.value);
}

/* The accumulator holds the number of the call. Runs from `first` to before `end`. */
static void write_tree(struct code *code, const struct policy *policy, const struct runs *runs, size_t first, size_t end) {
    if (end - first == 1) {
        write_leaf(code, policy, runs->at[first].verdict);
        return;
    }
    size_t middle = first + (end - first) / 2;
    size_t test = emit(code, BPF_JMP | BPF_JGE | BPF_K, runs->at[middle].start);
    write_tree(code, policy, runs, first, middle);
    code->at[test].jt = distance(test, code->len);
    write_tree(code, policy, runs, middle, end);
}

static int is_refused(const struct policy *policy, const char *name) {
    for (size_t i = 0; i < policy->refusal_count; i++)
        if (!strcmp(policy->refusals[i].name, name)) return 1;
    return 0;
}

static struct verdict verdict_of(const struct policy *policy, const struct entry *entry) {
    if (entry->decision == DENY) return (struct verdict){SECCOMP_RET_ERRNO | EPERM, NULL};
    if (entry->decision == ABSENT) return (struct verdict){SECCOMP_RET_ERRNO | ENOSYS, NULL};
    return (struct verdict){SECCOMP_RET_ALLOW, is_refused(policy, entry->name) ? entry->name : NULL};
}

static void add_run(struct runs *runs, uint32_t start, struct verdict verdict) {
    const struct verdict *last = runs->count ? &runs->at[runs->count - 1].verdict : NULL;
    if (last && last->value == verdict.value && !last->refusals && !verdict.refusals) return;
    if (runs->count == MAX_RUNS) die("too many runs");
    runs->at[runs->count++] = (struct run){start, verdict};
}

static void find_runs(struct runs *runs, const struct policy *policy, const struct machine *machine) {
    const struct verdict absent = {SECCOMP_RET_ERRNO | ENOSYS, NULL};
    static struct verdict verdicts[NUMBERS];
    for (size_t i = 0; i < NUMBERS; i++) verdicts[i] = absent;
    for (size_t i = 0; i < policy->entry_count; i++) {
        int number = seccomp_syscall_resolve_name_arch(machine->token, policy->entries[i].name);
        if (number >= NUMBERS) die("'%s' has too high a number", policy->entries[i].name);
        if (number >= 0) verdicts[number] = verdict_of(policy, &policy->entries[i]);
    }
    for (uint32_t i = 0; i < NUMBERS; i++) add_run(runs, i, verdicts[i]);
    if (!machine->foreign) return;
    add_run(runs, machine->foreign, (struct verdict){SECCOMP_RET_KILL_PROCESS, NULL});
    add_run(runs, UINT32_MAX, absent); /* -1: a tracer cancelled the call */
}

static void write_table(struct code *code, const struct policy *policy, const struct machine *machine) {
    struct runs *runs = calloc(1, sizeof *runs);
    if (!runs) die("no memory");
    find_runs(runs, policy, machine);
    emit(code, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    code->at[emit(code, BPF_JMP | BPF_JEQ | BPF_K, machine->audit)].jt = 1;
    emit(code, BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    emit(code, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    write_tree(code, policy, runs, 0, runs->count);
    free(runs);
}

/* --- output */

static void print_table(const char *name, const struct policy *policy, const struct machine *machine) {
    struct code *code = calloc(1, sizeof *code);
    if (!code) die("no memory");
    write_table(code, policy, machine);
    printf("\nenum { %s_LEN = %zu };\nstatic const struct sock_filter %s[%s_LEN] = {\n", name, code->len, name, name);
    for (size_t i = 0; i < code->len; i++) {
        const struct sock_filter *one = &code->at[i];
        printf("%s{0x%02x, %u, %u, 0x%08x},%s", i % 4 ? " " : "    ", one->code, one->jt, one->jf, one->k,
               i % 4 == 3 || i + 1 == code->len ? "\n" : "");
    }
    printf("};\n");
    free(code);
}

static void print_header(const struct policy *container, const struct policy *process) {
    printf("/* Generated from native/seccomp by scripts/seccomp_tables.py; do not edit. */\n"
           "#ifndef DSEC_SECCOMP_TABLES_H\n#define DSEC_SECCOMP_TABLES_H\n\n#include <linux/filter.h>\n");
    for (size_t i = 0; i < sizeof MACHINES / sizeof *MACHINES; i++) {
        printf("\n#%s defined(%s)\n", i ? "elif" : "if", MACHINES[i].macro);
        print_table("DSEC_SECCOMP_CONTAINER", container, &MACHINES[i]);
        print_table("DSEC_SECCOMP_PROCESS", process, &MACHINES[i]);
    }
    printf("\n#else\n#error \"no system call tables for this architecture\"\n#endif\n\n#endif\n");
}

static void print_lists(const char *policy_name, const struct policy *policy) {
    static const char *const WORDS[] = {"allow", "deny", "absent"};
    for (size_t i = 0; i < policy->entry_count; i++) {
        const struct entry *entry = &policy->entries[i];
        printf("%s %s %s", policy_name, WORDS[entry->decision], entry->name);
        for (size_t k = 0; k < sizeof MACHINES / sizeof *MACHINES; k++)
            printf(" %d", seccomp_syscall_resolve_name_arch(MACHINES[k].token, entry->name));
        putchar('\n');
    }
}

int main(int argc, char **argv) {
    int lists = argc == 3 && !strcmp(argv[1], "--lists");
    if (argc != 2 + lists) {
        fprintf(stderr, "usage: %s [--lists] DIRECTORY\n", argv[0]);
        return 2;
    }
    static struct policy container, process;
    parse(&container, argv[argc - 1], "container.policy");
    parse(&process, argv[argc - 1], "process.policy");
    if (lists) {
        print_lists("container", &container);
        print_lists("process", &process);
    } else {
        print_header(&container, &process);
    }
    return fflush(stdout) || ferror(stdout) ? 1 : 0;
}
