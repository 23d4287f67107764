/*
 * A btrfs image in the memory of a test: memory_image
 *
 * The program stores the bytes itself, so it can look at them, count writes, or let a write fail.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ubtrfs.h>

/* The storage. Threads of the library call the functions below at the same time; they only touch the bytes of their
 * range, and the library never writes one range twice at the same time. */
struct storage {
  unsigned char *bytes;
  int is_broken;
};

static int storage_read(void *user, void *data, size_t len, uint64_t offset) {
  const struct storage *storage = (const struct storage *)user;
  memcpy(data, storage->bytes + offset, len);
  return 0;
}

static int storage_write(void *user, const void *data, size_t len, uint64_t offset) {
  struct storage *storage = (struct storage *)user;
  if (storage->is_broken) return -EIO;
  memcpy(storage->bytes + offset, data, len);
  return 0;
}

static int storage_flush(void *user) {
  (void)user;
  return 0;
}

static void storage_release(void *user) {
  free(((struct storage *)user)->bytes);
  puts("released");
}

static void check(int status, ubtrfs_error *error) {
  if (status != 0) {
    fprintf(stderr, "memory_image: %s\n", ubtrfs_error_message(error));
    exit(1);
  }
}

int main(void) {
  const uint64_t size = UINT64_C(128) << 20;
  struct storage storage = {NULL, 0};
  ubtrfs_device_options options = UBTRFS_DEVICE_OPTIONS_INIT;
  ubtrfs_check_report report;
  ubtrfs_device *device;
  ubtrfs_error *error;
  ubtrfs_fs *fs;
  void *text;
  size_t len;
  storage.bytes = (unsigned char *)calloc(1, size);
  if (storage.bytes == NULL) return 1;
  options.size_bytes = size;
  options.name = "the storage of the test";
  options.user = &storage;
  options.read_at = storage_read;
  options.write_at = storage_write;
  options.flush = storage_flush;
  options.release = storage_release;
  check(ubtrfs_device_new(&options, &device, &error), error);

  /* The code under test writes to a filesystem on the storage. */
  check(ubtrfs_make_devices(&device, 1, NULL, &error), error);
  check(ubtrfs_open_devices(&device, 1, NULL, &fs, &error), error);
  check(ubtrfs_write_file(fs, "/f", "durable", 7, &error), error);
  check(ubtrfs_sync(fs, &error), error);

  /* The storage breaks. Changes that are not durable are lost, and an error tells that. */
  storage.is_broken = 1;
  check(ubtrfs_write_file(fs, "/f", "lost", 4, &error), error);
  if (ubtrfs_close(fs, &error) != 0) printf("%s\n", ubtrfs_error_message(error));
  ubtrfs_error_free(error);

  /* What was durable is there. */
  storage.is_broken = 0;
  check(ubtrfs_check_devices(&device, 1, UBTRFS_CHECK_DATA, NULL, NULL, NULL, &report, &error), error);
  printf("clean: %s\n", report.is_clean ? "yes" : "no");
  check(ubtrfs_open_devices(&device, 1, NULL, &fs, &error), error);
  check(ubtrfs_read_file(fs, "/f", &text, &len, &error), error);
  printf("%s\n", (const char *)text);
  ubtrfs_free(text);
  check(ubtrfs_close(fs, &error), error);
  check(ubtrfs_device_close(device, &error), error);
  return 0;
}
