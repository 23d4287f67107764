/*
 * Calls at a wrong time, and functions of the program that fail: errors come back, and nothing hangs or is lost. Prints
 * "done".
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "expect.h"

static const uint64_t SIZE = 256 << 20;

static ubtrfs_fs *in_memory(void) {
  ubtrfs_fs *fs;
  OK(ubtrfs_make_in_memory(SIZE, &fs, &error));
  return fs;
}

static void a_transaction_is_begun_first(void) {
  ubtrfs_fs *fs = in_memory();
  OK(ubtrfs_write_file(fs, "/kept", "text", 4, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_abort(fs, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_commit(fs, &error));
  OK(ubtrfs_subvolume_create(fs, "/subvolume", &error));
  OK(ubtrfs_begin(fs, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_subvolume_set_read_only(fs, "/subvolume", 1, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_set_label(fs, "label", &error));
  OK(ubtrfs_abort(fs, &error));
  OK(ubtrfs_write_file(fs, "/subvolume/f", "text", 4, &error));
  OK(ubtrfs_close(fs, &error));
}

static void nothing_without_a_name_is_removed(void) {
  const char *paths[] = {"", "/", "/d/..", "/d/."};
  int exists;
  ubtrfs_fs *fs = in_memory();
  OK(ubtrfs_mkdir(fs, "/d", &error));
  OK(ubtrfs_write_file(fs, "/d/f", "text", 4, &error));
  for (size_t at = 0; at < sizeof paths / sizeof *paths; at++) {
    FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_remove_all(fs, paths[at], &error));
  }
  OK(ubtrfs_exists(fs, "/d/f", &exists, &error));
  EXPECT(exists == 1);
  OK(ubtrfs_symlink(fs, "loop", "/loop", &error));
  FAILS(ELOOP, UBTRFS_ERROR_FAILED, ubtrfs_exists(fs, "/loop", &exists, &error));
  OK(ubtrfs_close(fs, &error));
}

static void a_device_has_one_filesystem(void) {
  ubtrfs_device *device, *twice[2];
  ubtrfs_fs *fs, *other;
  OK(ubtrfs_device_in_memory(SIZE, &device, &error));
  twice[0] = twice[1] = device;
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_make_devices(twice, 2, NULL, &error));
  OK(ubtrfs_make_devices(&device, 1, NULL, &error));
  OK(ubtrfs_open_devices(&device, 1, NULL, &fs, &error));
  FAILS(EBUSY, UBTRFS_ERROR_FAILED, ubtrfs_open_devices(&device, 1, NULL, &other, &error));
  OK(ubtrfs_write_file(fs, "/f", "text", 4, &error));
  OK(ubtrfs_close(fs, &error));
  OK(ubtrfs_open_devices(&device, 1, NULL, &fs, &error));
  OK(ubtrfs_close(fs, &error));
  OK(ubtrfs_device_close(device, &error));
}

static int interrupted_read(void *user, void *data, size_t len, size_t *nr_read) {
  (void)data;
  (void)len;
  (void)nr_read;
  EXPECT(++*(int *)user == 1);
  return -EINTR;
}

static int interrupted_write(void *user, const void *data, size_t len) {
  (void)data;
  (void)len;
  EXPECT(++*(int *)user == 1);
  return -EINTR;
}

static int failing_read(void *user, void *data, size_t len, size_t *nr_read) {
  (void)user;
  (void)data;
  (void)len;
  (void)nr_read;
  return -ETIMEDOUT;
}

static void functions_that_fail_end_the_operation(void) {
  int nr_calls = 0;
  ubtrfs_fs *fs = in_memory();
  OK(ubtrfs_subvolume_create(fs, "/s", &error));
  OK(ubtrfs_snapshot(fs, "/s", "/ro", UBTRFS_SNAPSHOT_READ_ONLY, &error));
  FAILS(ECANCELED, UBTRFS_ERROR_FAILED, ubtrfs_receive(fs, "/", 0, interrupted_read, &nr_calls, NULL, NULL, &error));
  nr_calls = 0;
  FAILS(ECANCELED, UBTRFS_ERROR_FAILED, ubtrfs_send(fs, "/ro", NULL, interrupted_write, &nr_calls, NULL, &error));
  FAILS(ETIMEDOUT, UBTRFS_ERROR_FAILED, ubtrfs_receive(fs, "/", 0, failing_read, NULL, NULL, NULL, &error));
  OK(ubtrfs_close(fs, &error));
}

static int take(void *user, const void *data, size_t len) {
  (void)user;
  (void)data;
  (void)len;
  return 0;
}

static ubtrfs_fs *sending;
static ubtrfs_job *paused;

static void *send_it(void *user) {
  ubtrfs_error *failure = NULL;
  *(int *)user = ubtrfs_send(sending, "/ro", NULL, take, NULL, paused, &failure);
  return NULL;
}

static void a_closed_job_does_not_stop_its_operation(void) {
  pthread_t thread;
  int status = 1;
  sending = in_memory();
  OK(ubtrfs_subvolume_create(sending, "/s", &error));
  OK(ubtrfs_write_file(sending, "/s/f", "text", 4, &error));
  OK(ubtrfs_snapshot(sending, "/s", "/ro", UBTRFS_SNAPSHOT_READ_ONLY, &error));
  OK(ubtrfs_job_new(&paused, &error));
  EXPECT(ubtrfs_job_pause(paused, 1) == 0);
  EXPECT(pthread_create(&thread, NULL, send_it, &status) == 0);
  sleep(1);
  OK(ubtrfs_job_close(paused, &error));
  EXPECT(pthread_join(thread, NULL) == 0);
  EXPECT(status == 0);
  OK(ubtrfs_close(sending, &error));
}

static void a_forked_process_has_no_handles(void) {
  ubtrfs_fs *fs = in_memory();
  pid_t child;
  int status;
  OK(ubtrfs_write_file(fs, "/f", "text", 4, &error));
  child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    ubtrfs_fs *own;
    alarm(60);
    FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_write_file(fs, "/g", "text", 4, &error));
    FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_sync(fs, &error));
    FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_close(fs, &error));
    own = in_memory();
    OK(ubtrfs_write_file(own, "/f", "text", 4, &error));
    OK(ubtrfs_close(own, &error));
    _exit(0);
  }
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  OK(ubtrfs_write_file(fs, "/h", "text", 4, &error));
  OK(ubtrfs_close(fs, &error));
}

int main(void) {
  a_transaction_is_begun_first();
  nothing_without_a_name_is_removed();
  a_device_has_one_filesystem();
  functions_that_fail_end_the_operation();
  a_closed_job_does_not_stop_its_operation();
  a_forked_process_has_no_handles();
  puts("done");
  return 0;
}
