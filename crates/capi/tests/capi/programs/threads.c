/*
 * Threads share the handles of a filesystem, a file and a directory, also while one of them closes them: threads
 * Prints "done".
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ubtrfs.h>

enum { THREADS = 4, ROUNDS = 8, STEPS = 200, BLOCK = 4096 };

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "threads.c:%d: not so: %s\n", __LINE__, #condition);     \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

static ubtrfs_fs *fs;
static ubtrfs_file *file, *file_to_close;
static ubtrfs_dir *dir_to_close;
static ubtrfs_job *job;
static pthread_barrier_t barrier;

/* Each thread writes its own blocks of one file, and lines to the end of another. */
static void *work(void *number) {
  const size_t self = (size_t)(uintptr_t)number;
  char block[BLOCK], again[BLOCK], name[64];
  const ubtrfs_dir_entry *entry;
  ubtrfs_file *log;
  size_t step, len;
  memset(block, (int)('a' + self), sizeof block);
  EXPECT(ubtrfs_file_open(fs, "/log", UBTRFS_APPEND | UBTRFS_CREATE, 0644, &log, NULL) == 0);
  for (step = 0; step < STEPS; step++) {
    const uint64_t offset = (step * THREADS + self) * BLOCK;
    EXPECT(ubtrfs_file_pwrite(file, block, BLOCK, offset, NULL) == 0);
    EXPECT(ubtrfs_file_pread(file, again, BLOCK, offset, &len, NULL) == 0 && len == BLOCK);
    EXPECT(memcmp(block, again, BLOCK) == 0);
    EXPECT(ubtrfs_file_write(log, "0123456\n", 8, NULL) == 0);
    snprintf(name, sizeof name, "/dir/%zu-%zu", self, step);
    EXPECT(ubtrfs_write_file(fs, name, name, strlen(name), NULL) == 0);
    if (step % 50 == self) EXPECT(ubtrfs_sync(fs, NULL) == 0);
  }
  EXPECT(ubtrfs_file_close(log, NULL) == 0);
  /* One of them closes the handles; the others end in successes or in EBADF. */
  pthread_barrier_wait(&barrier);
  for (step = 0; step < STEPS; step++) {
    int status = ubtrfs_file_pread(file_to_close, again, BLOCK, 0, &len, NULL);
    EXPECT(status == 0 || status == -EBADF);
    status = ubtrfs_file_write(file_to_close, block, 10, NULL);
    EXPECT(status == 0 || status == -EBADF);
    /* The entry itself belongs to the thread that called last, so it is not read here. */
    status = ubtrfs_dir_next(dir_to_close, &entry, NULL);
    EXPECT(status == 0 || status == -EBADF);
    if (step == 20 * self + 10) {
      status = ubtrfs_file_close(file_to_close, NULL);
      EXPECT(status == 0 || status == -EBADF);
      status = ubtrfs_dir_close(dir_to_close, NULL);
      EXPECT(status == 0 || status == -EBADF);
    }
  }
  return NULL;
}

static int write_slowly(void *user, const void *data, size_t len) {
  size_t *nr = (size_t *)user;
  (void)data;
  *nr += len;
  return 0;
}

/* Sends until the job is cancelled or the stream ends. */
static void *send_all(void *status) {
  size_t nr = 0;
  *(int *)status = ubtrfs_send(fs, "/snapshot", NULL, write_slowly, &nr, job, NULL);
  return NULL;
}

int main(void) {
  pthread_t threads[THREADS], sender;
  ubtrfs_metadata st;
  ubtrfs_progress progress;
  ubtrfs_error *error;
  size_t round, i;
  int status = 0;
  EXPECT(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
  for (round = 0; round < ROUNDS; round++) {
    EXPECT(ubtrfs_make_in_memory(512 << 20, &fs, NULL) == 0);
    EXPECT(ubtrfs_mkdir(fs, "/dir", NULL) == 0);
    EXPECT(ubtrfs_file_open(fs, "/file", UBTRFS_READ | UBTRFS_WRITE | UBTRFS_CREATE, 0644, &file, NULL) == 0);
    EXPECT(ubtrfs_file_open(fs, "/other", UBTRFS_READ | UBTRFS_WRITE | UBTRFS_CREATE, 0644, &file_to_close, NULL) == 0);
    EXPECT(ubtrfs_dir_open(fs, "/dir", &dir_to_close, NULL) == 0);
    for (i = 0; i < THREADS; i++) EXPECT(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0);
    for (i = 0; i < THREADS; i++) EXPECT(pthread_join(threads[i], NULL) == 0);
    EXPECT(ubtrfs_stat(fs, "/log", &st, NULL) == 0 && st.size == 8 * THREADS * STEPS);
    EXPECT(ubtrfs_stat(fs, "/file", &st, NULL) == 0 && st.size == (uint64_t)BLOCK * THREADS * STEPS);

    /* A send is watched and cancelled by another thread. */
    EXPECT(ubtrfs_snapshot(fs, "/", "/snapshot", UBTRFS_SNAPSHOT_READ_ONLY, NULL) == 0);
    EXPECT(ubtrfs_job_new(&job, NULL) == 0);
    EXPECT(pthread_create(&sender, NULL, send_all, &status) == 0);
    do {
      EXPECT(ubtrfs_job_progress(job, &progress, NULL) == 0);
    } while (round % 2 == 0 && progress.done == 0);
    EXPECT(ubtrfs_job_cancel(job) == 0);
    EXPECT(pthread_join(sender, NULL) == 0);
    EXPECT(ubtrfs_job_close(job, NULL) == 0);
    EXPECT(status == 0 || status == -ECANCELED);

    /* The filesystem is closed while a file is open. */
    EXPECT(ubtrfs_close(fs, NULL) == 0);
    EXPECT(ubtrfs_file_write(file, "late", 4, &error) < 0);
    EXPECT(ubtrfs_error_message(error)[0] != 0 && ubtrfs_error_free(error) == 0);
    EXPECT(ubtrfs_file_close(file, NULL) == 0);
  }
  puts("done");
  return 0;
}
