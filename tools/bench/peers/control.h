/* The words of control.py for programs in C. */
#ifndef ZBMD_PEERS_CONTROL_H
#define ZBMD_PEERS_CONTROL_H

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct control {
    FILE *commands, *replies;
};

/* Connect to the benchmark at an abstract address as `rank`; 0, or -1 and errno. */
static int control_open(struct control *control, const char *name, int rank) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || length + 1 > sizeof address.sun_path) return -1;
    memcpy(address.sun_path + 1, name, length);
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    if (connect(fd, (struct sockaddr *)&address, bytes) != 0) return -1;
    control->commands = fdopen(fd, "r");
    control->replies = fdopen(dup(fd), "w");
    if (control->commands == NULL || control->replies == NULL) return -1;
    fprintf(control->replies, "%d\n", rank);
    return fflush(control->replies);
}

/* The next command, `what` of 32 bytes; 0 when there is none any more. */
static int control_next(struct control *control, char *what, long *nbytes, long *iterations) {
    char line[256];
    if (fgets(line, sizeof line, control->commands) == NULL) return 0;
    return sscanf(line, "%31s %ld %ld", what, nbytes, iterations) == 3 && *nbytes >= 0 && *iterations > 0;
}

static void control_reply(struct control *control, const double *ns, long count) {
    fputs("{\"ns\":[", control->replies);
    for (long i = 0; i < count; i++) fprintf(control->replies, "%s%.1f", i ? "," : "", ns[i]);
    fputs("]}\n", control->replies);
    fflush(control->replies);
}

#endif
