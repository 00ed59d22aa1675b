/* Memory of another device, such as a GPU, as a dma-buf that an RDMA device may touch: ibv_reg_dmabuf_mr(3).
 *
 * It is looked up when it is called, so that zbmd is built and runs with a libibverbs of before rdma-core 34.
 */
#ifndef ZBMD_RDMA_DMABUF_H
#define ZBMD_RDMA_DMABUF_H

#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>

typedef struct ibv_mr *(*zbmd_reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);

/* NULL with errno, which is ENOSYS where this libibverbs does not have it. offset: in the dma-buf; address: by which
 * requests name its first byte. */
static struct ibv_mr *zbmd_dmabuf_register(struct ibv_pd *domain, uint64_t offset, size_t nbytes, uint64_t address,
                                           int fd, int access) {
    zbmd_reg_dmabuf_mr call = (zbmd_reg_dmabuf_mr)dlsym(RTLD_DEFAULT, "ibv_reg_dmabuf_mr");
    if (call == NULL) {
        errno = ENOSYS;
        return NULL;
    }
    return call(domain, offset, nbytes, address, fd, access);
}

#endif
