/* Two ranks of MPI without Python: what native code gets. Times what patterns.py says.
 *
 *   mpicc -O2 mpi_pair.c -o mpi_pair && mpirun -n 2 ./mpi_pair CONTROL
 */
#include "control.h"
#include <mpi.h>
#include <stdlib.h>
#include <time.h>

#define WINDOW_MAX 64
#define WINDOW_BYTES (64L << 20)
#define WARMUP_MAX 100

static int rank;
static MPI_Request requests[WINDOW_MAX];

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void ping(char *out, char *into, long nbytes) {
    for (int turn = 0; turn < 2; turn++) {
        if (turn == rank) MPI_Send(out, (int)nbytes, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD);
        else MPI_Recv(into, (int)nbytes, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

static void send_window(char *out, char *into, long nbytes, long window) {
    char answer = 0;
    for (long i = 0; i < window; i++) {
        if (rank == 0) MPI_Isend(out, (int)nbytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &requests[i]);
        else MPI_Irecv(into, (int)nbytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &requests[i]);
    }
    MPI_Waitall((int)window, requests, MPI_STATUSES_IGNORE);
    if (rank == 0) MPI_Recv(&answer, 1, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else MPI_Send(&answer, 1, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
}

static void measure(struct control *control, const char *what, long nbytes, long iterations) {
    int is_put = strcmp(what, "put") == 0, is_echo = strcmp(what, "echo") == 0;
    long window = WINDOW_BYTES / nbytes;
    if (window < 1) window = 1;
    if (window > WINDOW_MAX) window = WINDOW_MAX;
    if (is_put) iterations = iterations / window < 2 ? 2 : iterations / window;
    long warmups = 1 + iterations / 10 > WARMUP_MAX ? WARMUP_MAX : 1 + iterations / 10;
    char *out = malloc((size_t)nbytes), *into = malloc((size_t)nbytes);
    double *samples = malloc((size_t)iterations * sizeof *samples);
    if (!out || !into || !samples) abort();
    memset(out, 1, (size_t)nbytes);
    memset(into, 1, (size_t)nbytes);
    for (long i = -warmups; i < iterations; i++) {
        double began_ns = now_ns();
        if (is_put) send_window(out, into, nbytes, window);
        else ping(is_echo ? into : out, into, nbytes);
        if (i >= 0) samples[i] = (now_ns() - began_ns) / (is_put ? (double)window : 2.0);
    }
    control_reply(control, samples, iterations);
    free(samples);
    free(into);
    free(out);
}

int main(int argc, char **argv) {
    struct control control;
    char what[32];
    long nbytes, iterations;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc != 2 || control_open(&control, argv[1], rank) != 0) {
        perror("mpi_pair: no benchmark at this address");
        MPI_Abort(MPI_COMM_WORLD, 1);
        return 1;
    }
    while (control_next(&control, what, &nbytes, &iterations) && nbytes > 0)
        measure(&control, what, nbytes, iterations);
    MPI_Finalize();
    return 0;
}
