/* Diagnostics go to standard error, which the engine keeps in its state directory. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "spawner.h"

void note(const char *what, const char *name, int err) {
    dprintf(2, "spawner: %s%s%s: %s\n", what, *name ? " " : "", name, strerror(err));
}

void die(const char *what) {
    note(what, "", errno);
    _exit(70);
}
