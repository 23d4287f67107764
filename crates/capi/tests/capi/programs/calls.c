/*
 * Calls functions of the library in a way that works, and compares the results: calls FOLDER
 * Prints "done". The program manage.c calls the rest.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <string.h>
#include <unistd.h>
#include "expect.h"

static void errors(ubtrfs_fs *fs) {
  ubtrfs_error *gone;
  void *data;
  size_t len;
  EXPECT(strcmp(ubtrfs_version(), "0.1.0") == 0);
  EXPECT(ubtrfs_read_file(fs, "/nothing", &data, &len, &error) == -ENOENT);
  EXPECT(data == NULL && len == 0);
  EXPECT(strcmp(ubtrfs_error_message(error), "cannot open '/nothing': no such file or directory") == 0);
  EXPECT(strcmp(ubtrfs_error_operation(error), "open") == 0);
  EXPECT(strcmp(ubtrfs_error_path(error), "/nothing") == 0);
  EXPECT(ubtrfs_error_kind(error) == UBTRFS_ERROR_FAILED);
  gone = error;
  EXPECT(ubtrfs_error_free(gone) == 0);
  EXPECT(ubtrfs_error_free(gone) == -EBADF && ubtrfs_error_errno(gone) == 0 && ubtrfs_error_kind(gone) == 0);
  EXPECT(ubtrfs_error_message(gone)[0] != 0 && ubtrfs_error_message(NULL)[0] != 0);
  EXPECT(ubtrfs_error_free(NULL) == 0 && ubtrfs_free(NULL) == 0);
  /* Without a place for the error. */
  EXPECT(ubtrfs_unlink(fs, "/nothing", NULL) == -ENOENT);
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_unlink(fs, NULL, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_unlink(NULL, "/nothing", &error));
}

static void names(ubtrfs_fs *fs) {
  int exists = -1;
  char *target;
  ubtrfs_metadata st;
  OK(ubtrfs_mkdir(fs, "/dir", &error));
  OK(ubtrfs_mkdir_all(fs, "/dir/a/b", &error));
  OK(ubtrfs_write_file(fs, "/dir/f", "text", 4, &error));
  OK(ubtrfs_write_file(fs, "/dir/empty", NULL, 0, &error));
  OK(ubtrfs_link(fs, "/dir/f", "/dir/g", &error));
  OK(ubtrfs_symlink(fs, "g", "/dir/h", &error));
  OK(ubtrfs_readlink(fs, "/dir/h", &target, &error));
  EXPECT(strcmp(target, "g") == 0);
  EXPECT(ubtrfs_free(target) == 0 && ubtrfs_free(target) == -EINVAL);
  OK(ubtrfs_lstat(fs, "/dir/h", &st, &error));
  EXPECT(st.kind == UBTRFS_KIND_SYMLINK);
  OK(ubtrfs_stat(fs, "/dir/h", &st, &error));
  EXPECT(st.kind == UBTRFS_KIND_FILE && st.nlink == 2 && st.size == 4 && st.mode == 0100644);
  EXPECT(st.subvolume_id == 5 && st.created.is_set == 1);
  OK(ubtrfs_rename(fs, "/dir/g", "/dir/i", &error));
  OK(ubtrfs_exists(fs, "/dir/g", &exists, &error));
  EXPECT(exists == 0);
  OK(ubtrfs_exists(fs, "/dir/i", &exists, &error));
  EXPECT(exists == 1);
  OK(ubtrfs_unlink(fs, "/dir/i", &error));
  FAILS(ENOTEMPTY, UBTRFS_ERROR_FAILED, ubtrfs_rmdir(fs, "/dir/a", &error));
  OK(ubtrfs_rmdir(fs, "/dir/a/b", &error));
  OK(ubtrfs_reflink(fs, "/dir/f", "/dir/copy", &error));
  OK(ubtrfs_mkdir(fs, "/nodes", &error));
  OK(ubtrfs_mknod(fs, "/nodes/null", 0020666, 1, 3, &error));
  OK(ubtrfs_stat(fs, "/nodes/null", &st, &error));
  EXPECT(st.kind == UBTRFS_KIND_CHAR_DEVICE && st.device_major == 1 && st.device_minor == 3);
  OK(ubtrfs_mknod(fs, "/nodes/pipe", 0010640, 0, 0, &error));
  FAILS(EEXIST, UBTRFS_ERROR_FAILED, ubtrfs_mknod(fs, "/nodes/pipe", 0010640, 0, 0, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_mknod(fs, "/nodes/dir", 0040755, 0, 0, &error));
}

static void attributes(ubtrfs_fs *fs) {
  ubtrfs_times times = UBTRFS_TIMES_INIT;
  ubtrfs_metadata st;
  void *value;
  char *list;
  size_t len;
  OK(ubtrfs_chown(fs, "/dir/f", 1000, UBTRFS_UNCHANGED, 0, &error));
  OK(ubtrfs_chmod(fs, "/dir/f", 04750, &error));
  times.modified.seconds = -2;
  times.modified.nanoseconds = 5;
  times.modified.is_set = 1;
  OK(ubtrfs_utimes(fs, "/dir/f", &times, 0, &error));
  OK(ubtrfs_stat(fs, "/dir/f", &st, &error));
  EXPECT(st.uid == 1000 && st.gid == 0 && st.mode == 0104750);
  EXPECT(st.modified.seconds == -2 && st.modified.nanoseconds == 5 && st.modified.is_set == 1);
  times.modified.nanoseconds = 1000000000;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_utimes(fs, "/dir/f", &times, 0, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_chmod(fs, "/dir/f", 0100644, &error));
  OK(ubtrfs_setxattr(fs, "/dir/f", "user.color", "blue", 4, &error));
  OK(ubtrfs_setxattr(fs, "/dir/f", "user.empty", NULL, 0, &error));
  OK(ubtrfs_getxattr(fs, "/dir/f", "user.color", &value, &len, &error));
  EXPECT(len == 4 && strcmp((char *)value, "blue") == 0 && ubtrfs_free(value) == 0);
  OK(ubtrfs_listxattr(fs, "/dir/f", &list, &len, &error));
  EXPECT(len == 22 && strlen(list) == 10 && strlen(list + 11) == 10);
  EXPECT(strcmp(list, "user.color") == 0 || strcmp(list + 11, "user.color") == 0);
  EXPECT(ubtrfs_free(list) == 0);
  OK(ubtrfs_removexattr(fs, "/dir/f", "user.color", &error));
  FAILS(ENODATA, UBTRFS_ERROR_FAILED, ubtrfs_getxattr(fs, "/dir/f", "user.color", &value, &len, &error));
  FAILS(ENODATA, UBTRFS_ERROR_FAILED, ubtrfs_removexattr(fs, "/dir/f", "user.color", &error));
}

static void files(ubtrfs_fs *fs) {
  ubtrfs_file *file, *other;
  ubtrfs_metadata st;
  char buffer[64] = {0};
  size_t nr_read;
  uint64_t position, start, end;
  void *data;
  size_t len;
  OK(ubtrfs_file_open(fs, "/file", UBTRFS_READ | UBTRFS_WRITE | UBTRFS_CREATE, 0600, &file, &error));
  OK(ubtrfs_file_write(file, "one two", 7, &error));
  OK(ubtrfs_file_pwrite(file, "1", 1, 0, &error));
  OK(ubtrfs_file_seek(file, -3, UBTRFS_SEEK_END, &position, &error));
  EXPECT(position == 4);
  OK(ubtrfs_file_read(file, buffer, SIZE_MAX / 2, &nr_read, &error));
  EXPECT(nr_read == 3 && memcmp(buffer, "two", 3) == 0);
  OK(ubtrfs_file_seek(file, 0, UBTRFS_SEEK_CUR, NULL, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_file_seek(file, -100, UBTRFS_SEEK_CUR, NULL, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_file_seek(file, 0, 3, NULL, &error));
  OK(ubtrfs_file_pread(file, buffer, sizeof buffer, 0, &nr_read, &error));
  EXPECT(nr_read == 7 && memcmp(buffer, "1ne two", 7) == 0);
  OK(ubtrfs_file_pread(file, buffer, sizeof buffer, 7, &nr_read, &error));
  EXPECT(nr_read == 0);
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_file_pread(file, buffer, SIZE_MAX, 0, &nr_read, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_file_pread(file, NULL, 1, 0, &nr_read, &error));
  OK(ubtrfs_file_pwrite(file, buffer, sizeof buffer, 1 << 20, &error));
  OK(ubtrfs_file_sync_data(file, &error));
  OK(ubtrfs_file_next_data(file, 4096, &start, &end, &error));
  EXPECT(start == 1 << 20 && end == (1 << 20) + 64);
  OK(ubtrfs_file_next_data(file, end, &start, &end, &error));
  EXPECT(start == (1 << 20) + 64 && end == start);
  OK(ubtrfs_file_truncate(file, 3, &error));
  OK(ubtrfs_file_sync(file, &error));
  OK(ubtrfs_file_stat(file, &st, &error));
  EXPECT(st.size == 3 && st.mode == 0100600);
  OK(ubtrfs_file_open(fs, "/file", UBTRFS_APPEND, 0, &other, &error));
  OK(ubtrfs_file_write(other, "!", 1, &error));
  FAILS(EBADF, UBTRFS_ERROR_FAILED, ubtrfs_file_read(other, buffer, 1, &nr_read, &error));
  OK(ubtrfs_file_close(other, &error));
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_file_close(other, &error));
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_file_sync((ubtrfs_file *)fs, &error));
  OK(ubtrfs_file_close(file, &error));
  OK(ubtrfs_read_file(fs, "/file", &data, &len, &error));
  EXPECT(len == 4 && strcmp((char *)data, "1ne!") == 0);
  EXPECT(ubtrfs_free(data) == 0);
  FAILS(EISDIR, UBTRFS_ERROR_FAILED, ubtrfs_file_open(fs, "/dir", UBTRFS_READ, 0, &file, &error));
  EXPECT(file == NULL);
}

static void directories(ubtrfs_fs *fs) {
  ubtrfs_dir *dir;
  const ubtrfs_dir_entry *entry;
  ubtrfs_metadata st;
  int nr = 0;
  OK(ubtrfs_dir_open(fs, "/dir", &dir, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_dir_stat(dir, &st, &error));
  for (;;) {
    OK(ubtrfs_dir_next(dir, &entry, &error));
    if (entry == NULL) break;
    nr++;
    EXPECT(strlen(entry->name) == entry->name_len && entry->is_subvolume == 0);
    OK(ubtrfs_dir_stat(dir, &st, &error));
    EXPECT(st.kind == entry->kind);
  }
  EXPECT(nr == 5);
  OK(ubtrfs_dir_next(dir, &entry, &error));
  EXPECT(entry == NULL);
  OK(ubtrfs_dir_close(dir, &error));
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_dir_next(dir, &entry, &error));
  OK(ubtrfs_remove_all(fs, "/dir", &error));
}

/* A stream in memory. */
struct stream {
  char *bytes;
  size_t len, at;
};

static int write_stream(void *user, const void *data, size_t len) {
  struct stream *stream = (struct stream *)user;
  char *grown = (char *)realloc(stream->bytes, stream->len + len);
  if (grown == NULL) return -ENOMEM;
  memcpy(grown + stream->len, data, len);
  stream->bytes = grown;
  stream->len += len;
  return 0;
}

static int read_stream(void *user, void *data, size_t len, size_t *nr_read) {
  struct stream *stream = (struct stream *)user;
  *nr_read = stream->len - stream->at < len ? stream->len - stream->at : len;
  memcpy(data, stream->bytes + stream->at, *nr_read);
  stream->at += *nr_read;
  return 0;
}

static int fail_stream(void *user, const void *data, size_t len) {
  (void)user, (void)data, (void)len;
  return -EPIPE;
}

static void subvolumes(ubtrfs_fs *fs, const char *folder) {
  ubtrfs_subvolume *list, *one;
  ubtrfs_send_options options = UBTRFS_SEND_OPTIONS_INIT;
  ubtrfs_receive_report report;
  ubtrfs_progress progress;
  ubtrfs_fs *backup;
  ubtrfs_job *job;
  struct stream whole = {NULL, 0, 0}, difference = {NULL, 0, 0};
  char path[4096];
  uint64_t id;
  FILE *file;
  void *data;
  size_t nr, len;
  OK(ubtrfs_subvolume_create(fs, "/home", &error));
  OK(ubtrfs_write_file(fs, "/home/f", "sunday", 6, &error));
  OK(ubtrfs_snapshot(fs, "/home", "/sunday", UBTRFS_SNAPSHOT_READ_ONLY, &error));
  OK(ubtrfs_write_file(fs, "/home/f", "monday", 6, &error));
  OK(ubtrfs_snapshot(fs, "/home", "/monday", 0, &error));
  OK(ubtrfs_subvolume_set_read_only(fs, "/monday", 1, &error));
  OK(ubtrfs_subvolume_list(fs, &list, &nr, &error));
  EXPECT(nr == 4 && strcmp(list[0].path, "") == 0 && strcmp(list[2].path, "sunday") == 0);
  EXPECT(list[0].parent_id == 0 && list[1].parent_id == 5 && list[3].is_read_only == 1);
  OK(ubtrfs_subvolume_info(fs, "/sunday", &one, &error));
  EXPECT(memcmp(one->parent_uuid, list[1].uuid, 16) == 0 && one->id == list[2].id);
  OK(ubtrfs_subvolume_default(fs, &id, &error));
  EXPECT(id == 5);
  OK(ubtrfs_subvolume_set_default(fs, "/sunday", &error));
  OK(ubtrfs_subvolume_default(fs, &id, &error));
  EXPECT(id == one->id);
  OK(ubtrfs_subvolume_set_default(fs, "/", &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_subvolume_set_default(fs, "/home/f", &error));
  EXPECT(ubtrfs_free(list) == 0 && ubtrfs_free(one) == 0 && ubtrfs_free(one) == -EINVAL);

  OK(ubtrfs_job_new(&job, &error));
  OK(ubtrfs_send(fs, "/sunday", NULL, write_stream, &whole, job, &error));
  OK(ubtrfs_job_progress(job, &progress, &error));
  EXPECT(progress.done == whole.len && progress.is_cancelled == 0);
  OK(ubtrfs_job_wait(job, 1, &progress, &error));
  EXPECT(progress.done == whole.len && progress.is_paused == 0);
  options.parent = "/sunday";
  options.version = 2;
  options.flags = UBTRFS_SEND_COMPRESSED_DATA;
  OK(ubtrfs_send(fs, "/monday", &options, write_stream, &difference, NULL, &error));
  FAILS(EPIPE, UBTRFS_ERROR_FAILED, ubtrfs_send(fs, "/monday", NULL, fail_stream, NULL, NULL, &error));
  FAILS(EPERM, UBTRFS_ERROR_FAILED, ubtrfs_send(fs, "/home", NULL, write_stream, &whole, NULL, &error));
  EXPECT(ubtrfs_job_pause(job, 1) == 0 && ubtrfs_job_pause(job, 0) == 0);
  EXPECT(ubtrfs_job_cancel(job) == 0);
  FAILS(ECANCELED, UBTRFS_ERROR_FAILED, ubtrfs_send(fs, "/monday", NULL, write_stream, &whole, job, &error));
  OK(ubtrfs_job_close(job, &error));
  EXPECT(ubtrfs_job_cancel(job) == -EBADF);

  OK(ubtrfs_make_in_memory(256 << 20, &backup, &error));
  OK(ubtrfs_receive(backup, "/", UBTRFS_RECEIVE_VERIFY, read_stream, &whole, NULL, &report, &error));
  EXPECT(report.nr_subvolumes == 1 && report.nr_errors == 0);
  OK(ubtrfs_receive(backup, "/", 0, read_stream, &difference, NULL, NULL, &error));
  OK(ubtrfs_read_file(backup, "/monday/f", &data, &len, &error));
  EXPECT(len == 6 && memcmp(data, "monday", 6) == 0 && ubtrfs_free(data) == 0);
  OK(ubtrfs_close(backup, &error));
  free(whole.bytes);
  free(difference.bytes);

  snprintf(path, sizeof path, "%s/stream", folder);
  file = fopen(path, "w+");
  EXPECT(file != NULL);
  OK(ubtrfs_send_fd(fs, "/monday", NULL, fileno(file), NULL, &error));
  EXPECT(lseek(fileno(file), 0, SEEK_SET) == 0);
  OK(ubtrfs_mkdir(fs, "/received", &error));
  OK(ubtrfs_receive_fd(fs, "/received", 0, fileno(file), NULL, &report, &error));
  EXPECT(report.nr_subvolumes == 1);
  fclose(file);
  FAILS(EBADF, UBTRFS_ERROR_FAILED, ubtrfs_send_fd(fs, "/monday", NULL, 1000000, NULL, &error));
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_receive_fd(fs, "/received", 0, -1, NULL, &report, &error));
  OK(ubtrfs_subvolume_delete(fs, "/sunday", &error));
}

static void count_message(void *user, const char *text) {
  EXPECT(text[0] != 0);
  ++*(int *)user;
}

static void archives(ubtrfs_fs *fs, const char *folder) {
  ubtrfs_import_options in = UBTRFS_IMPORT_OPTIONS_INIT;
  ubtrfs_export_options out = UBTRFS_EXPORT_OPTIONS_INIT;
  ubtrfs_archive_report report;
  ubtrfs_metadata st;
  struct stream archive = {NULL, 0, 0};
  const char *exclude[1];
  char path[4096];
  FILE *file;
  void *data;
  size_t len;
  int nr_messages = 0;
  OK(ubtrfs_mkdir_all(fs, "/packed/dir", &error));
  OK(ubtrfs_write_file(fs, "/packed/dir/f", "in a tar", 8, &error));
  OK(ubtrfs_write_file(fs, "/packed/f.o", "left out", 8, &error));
  OK(ubtrfs_setxattr(fs, "/packed/dir/f", "user.color", "blue", 4, &error));
  out.flags = UBTRFS_EXPORT_SPARSE;
  OK(ubtrfs_export(fs, "/packed", &out, write_stream, &archive, &report, &error));
  EXPECT(report.nr_bytes == 16 && report.nr_failed == 0 && archive.len % 512 == 0);
  exclude[0] = "*.o";
  in.exclude = exclude;
  in.nr_exclude = 1;
  in.flags = UBTRFS_IMPORT_OWNER;
  in.uid = 7;
  in.tell = count_message;
  in.tell_user = &nr_messages;
  OK(ubtrfs_import(fs, "/unpacked", &in, read_stream, &archive, &report, &error));
  EXPECT(report.nr_files == 1 && report.nr_failed == 0 && nr_messages == 0);
  OK(ubtrfs_stat(fs, "/unpacked/dir/f", &st, &error));
  EXPECT(st.uid == 7 && st.size == 8);
  OK(ubtrfs_getxattr(fs, "/unpacked/dir/f", "user.color", &data, &len, &error));
  EXPECT(len == 4 && ubtrfs_free(data) == 0);
  FAILS(ENOENT, UBTRFS_ERROR_FAILED, ubtrfs_stat(fs, "/unpacked/f.o", &st, &error));
  /* The end is missing, and the beginning is no archive. */
  archive.len = 700;
  archive.at = 0;
  EXPECT(ubtrfs_import(fs, "/half", NULL, read_stream, &archive, NULL, &error) < 0 && ubtrfs_error_free(error) == 0);
  memset(archive.bytes, 0x77, archive.len);
  archive.at = 0;
  EXPECT(ubtrfs_import(fs, "/none", NULL, read_stream, &archive, NULL, &error) < 0 && ubtrfs_error_free(error) == 0);
  free(archive.bytes);

  snprintf(path, sizeof path, "%s/archive", folder);
  file = fopen(path, "w+");
  EXPECT(file != NULL);
  OK(ubtrfs_export_fd(fs, "/packed", NULL, fileno(file), NULL, &error));
  EXPECT(lseek(fileno(file), 0, SEEK_SET) == 0);
  OK(ubtrfs_import_fd(fs, "/again", NULL, fileno(file), &report, &error));
  EXPECT(report.nr_files == 2);
  fclose(file);
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_export(fs, "/packed", NULL, NULL, NULL, NULL, &error));
  FAILS(EPIPE, UBTRFS_ERROR_FAILED, ubtrfs_export(fs, "/packed", NULL, fail_stream, NULL, NULL, &error));
}

/* A device of the program. */
struct disk {
  char *bytes;
  uint64_t size;
  int nr_flushes, nr_discards, nr_releases;
};

static int read_disk(void *user, void *data, size_t len, uint64_t offset) {
  memcpy(data, ((struct disk *)user)->bytes + offset, len);
  return 0;
}

static int write_disk(void *user, const void *data, size_t len, uint64_t offset) {
  memcpy(((struct disk *)user)->bytes + offset, data, len);
  return 0;
}

static int flush_disk(void *user) {
  ((struct disk *)user)->nr_flushes++;
  return 0;
}

static int discard_disk(void *user, uint64_t offset, uint64_t len) {
  (void)offset, (void)len;
  ((struct disk *)user)->nr_discards++;
  return 0;
}

static void release_disk(void *user) {
  ((struct disk *)user)->nr_releases++;
}

static int fail_read(void *user, void *data, size_t len, uint64_t offset) {
  (void)user, (void)data, (void)len, (void)offset;
  return -ENOMEDIUM;
}

static void tell(void *user, const ubtrfs_problem *problem) {
  EXPECT(problem->code[0] == 'E' || problem->code[0] == 'W');
  EXPECT(strncmp(problem->text, problem->code, strlen(problem->code)) == 0);
  ++*(int *)user;
}

static void devices(void) {
  struct disk disk = {NULL, 128 << 20, 0, 0, 0};
  ubtrfs_device_options options = UBTRFS_DEVICE_OPTIONS_INIT;
  ubtrfs_mkfs_options mkfs = UBTRFS_MKFS_OPTIONS_INIT;
  ubtrfs_check_report report;
  ubtrfs_progress progress;
  ubtrfs_job *job;
  ubtrfs_device *device, *pair[2];
  ubtrfs_fs *fs;
  uint64_t size;
  void *data;
  size_t len;
  int nr_problems = 0;
  disk.bytes = (char *)calloc(1, disk.size);
  EXPECT(disk.bytes != NULL);
  options.size_bytes = disk.size;
  options.user = &disk;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_device_new(&options, &device, &error));
  options.read_at = read_disk;
  options.write_at = write_disk;
  options.flush = flush_disk;
  options.discard = discard_disk;
  options.release = release_disk;
  options.name = "a disk in C";
  OK(ubtrfs_device_new(&options, &device, &error));
  OK(ubtrfs_device_size(device, &size, &error));
  EXPECT(size == disk.size);
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_make_devices(&device, 0, NULL, &error));
  OK(ubtrfs_make_devices(&device, 1, NULL, &error));
  OK(ubtrfs_open_devices(&device, 1, NULL, &fs, &error));
  OK(ubtrfs_write_file(fs, "/f", "in C", 4, &error));
  OK(ubtrfs_sync(fs, &error));
  OK(ubtrfs_close(fs, &error));
  EXPECT(disk.nr_flushes > 0 && disk.nr_discards > 0 && disk.nr_releases == 0);
  OK(ubtrfs_check_devices(&device, 1, UBTRFS_CHECK_DATA, tell, &nr_problems, NULL, &report, &error));
  EXPECT(nr_problems == 0 && report.is_clean == 1 && report.nr_inodes > 0);
  OK(ubtrfs_job_new(&job, &error));
  OK(ubtrfs_check_devices(&device, 1, 0, NULL, NULL, job, NULL, &error));
  OK(ubtrfs_job_progress(job, &progress, &error));
  EXPECT(progress.done > 0 && progress.total == 0);
  EXPECT(ubtrfs_job_cancel(job) == 0);
  FAILS(ECANCELED, UBTRFS_ERROR_FAILED, ubtrfs_check_devices(&device, 1, 0, tell, &nr_problems, job, NULL, &error));
  EXPECT(nr_problems == 0);
  OK(ubtrfs_job_close(job, &error));
  OK(ubtrfs_device_close(device, &error));
  EXPECT(disk.nr_releases == 1);

  /* The filesystem keeps the device. */
  options.flags = UBTRFS_DEVICE_READ_ONLY;
  options.write_at = NULL;
  options.flush = NULL;
  OK(ubtrfs_device_new(&options, &device, &error));
  OK(ubtrfs_open_devices(&device, 1, NULL, &fs, &error));
  OK(ubtrfs_device_close(device, &error));
  EXPECT(disk.nr_releases == 1);
  OK(ubtrfs_read_file(fs, "/f", &data, &len, &error));
  EXPECT(len == 4 && ubtrfs_free(data) == 0);
  FAILS(EROFS, UBTRFS_ERROR_FAILED, ubtrfs_mkdir(fs, "/d", &error));
  OK(ubtrfs_close(fs, &error));
  EXPECT(disk.nr_releases == 2);

  /* A tree block without a good copy. */
  for (size = 1 << 20; size < disk.size; size += 16384) {
    if (size != 64 << 20) memset(disk.bytes + size, 0x55, 100);
  }
  OK(ubtrfs_device_new(&options, &device, &error));
  EXPECT(ubtrfs_open_devices(&device, 1, NULL, &fs, &error) < 0 && ubtrfs_error_errno(error) > 0);
  EXPECT(fs == NULL && ubtrfs_error_free(error) == 0);
  OK(ubtrfs_check_devices(&device, 1, 0, tell, &nr_problems, NULL, &report, &error));
  EXPECT(nr_problems > 0 && report.is_clean == 0 && report.nr_errors > 0);
  OK(ubtrfs_device_close(device, &error));

  options.read_at = fail_read;
  options.release = NULL;
  OK(ubtrfs_device_new(&options, &device, &error));
  FAILS(EIO, UBTRFS_ERROR_FAILED, ubtrfs_open_devices(&device, 1, NULL, &fs, &error));
  OK(ubtrfs_device_close(device, &error));
  free(disk.bytes);

  OK(ubtrfs_device_in_memory(256 << 20, &pair[0], &error));
  OK(ubtrfs_device_in_memory(256 << 20, &pair[1], &error));
  mkfs.data_profile = "raid1";
  mkfs.metadata_profile = "raid1";
  OK(ubtrfs_make_devices(pair, 2, &mkfs, &error));
  OK(ubtrfs_open_devices(pair, 2, NULL, &fs, &error));
  OK(ubtrfs_close(fs, &error));
  OK(ubtrfs_device_close(pair[0], &error));
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_open_devices(pair, 2, NULL, &fs, &error));
  OK(ubtrfs_device_close(pair[1], &error));
}

static void images(const char *folder) {
  ubtrfs_mkfs_options mkfs = UBTRFS_MKFS_OPTIONS_INIT;
  ubtrfs_open_options options = UBTRFS_OPEN_OPTIONS_INIT;
  ubtrfs_space_usage usage;
  ubtrfs_metadata st;
  ubtrfs_fs *fs, *alice;
  ubtrfs_device *device;
  ubtrfs_check_report report;
  char path[4096], other[4096], *text;
  const char *paths[1];
  snprintf(path, sizeof path, "%s/image", folder);
  mkfs.label = "label";
  mkfs.csum = "xxhash";
  mkfs.uuid = "01234567-89ab-cdef-0123-456789abcdef";
  mkfs.seconds = 1000000000;
  mkfs.flags = UBTRFS_MKFS_TIME;
  OK(ubtrfs_make(path, 256 << 20, &mkfs, NULL, &fs, &error));
  FAILS(EEXIST, UBTRFS_ERROR_FAILED, ubtrfs_make(path, 256 << 20, &mkfs, NULL, &alice, &error));
  OK(ubtrfs_label(fs, &text, &error));
  EXPECT(strcmp(text, "label") == 0 && ubtrfs_free(text) == 0);
  OK(ubtrfs_usage(fs, &usage, &error));
  EXPECT(usage.total_bytes == 256 << 20 && usage.available_bytes <= usage.free_bytes);
  OK(ubtrfs_read_only_reason(fs, &text, &error));
  EXPECT(text == NULL);
  OK(ubtrfs_with_owner(fs, 1000, 100, 077, &alice, &error));
  OK(ubtrfs_write_file(alice, "/notes", "private", 7, &error));
  OK(ubtrfs_stat(fs, "/notes", &st, &error));
  EXPECT(st.uid == 1000 && st.gid == 100 && st.mode == 0100600);
  OK(ubtrfs_fs_release(alice, &error));
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_mkdir(alice, "/d", &error));

  OK(ubtrfs_begin(fs, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_begin(fs, &error));
  OK(ubtrfs_mkdir(fs, "/committed", &error));
  OK(ubtrfs_commit(fs, &error));
  OK(ubtrfs_begin(fs, &error));
  OK(ubtrfs_mkdir(fs, "/aborted", &error));
  OK(ubtrfs_abort(fs, &error));
  EXPECT(ubtrfs_close(fs, &error) < 0 && ubtrfs_error_free(error) == 0);
  FAILS(EBADF, UBTRFS_ERROR_USAGE, ubtrfs_close(fs, &error));

  options.flags = UBTRFS_OPEN_READ_ONLY;
  options.mount_options = "noatime";
  options.memory_bytes = 256 << 20;
  OK(ubtrfs_open(path, &options, &fs, &error));
  OK(ubtrfs_stat(fs, "/committed", &st, &error));
  FAILS(ENOENT, UBTRFS_ERROR_FAILED, ubtrfs_stat(fs, "/aborted", &st, &error));
  OK(ubtrfs_read_only_reason(fs, &text, &error));
  EXPECT(text != NULL && ubtrfs_free(text) == 0);
  OK(ubtrfs_close(fs, &error));
  options.subvolume = "missing";
  EXPECT(ubtrfs_open(path, &options, &fs, &error) < 0 && ubtrfs_error_free(error) == 0);
  options.subvolume = NULL;
  options.mount_options = "nonsense";
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_open(path, &options, &fs, &error));
  options.struct_size = 0;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_open(path, &options, &fs, &error));

  paths[0] = path;
  OK(ubtrfs_check(paths, 1, UBTRFS_CHECK_DATA, NULL, NULL, NULL, &report, &error));
  EXPECT(report.is_clean == 1 && report.data_bytes_verified == 0);
  paths[0] = NULL;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_check(paths, 1, 0, NULL, NULL, NULL, &report, &error));
  OK(ubtrfs_device_open(path, UBTRFS_DEVICE_READ_ONLY, &device, &error));
  OK(ubtrfs_device_close(device, &error));
  snprintf(other, sizeof other, "%s/device", folder);
  FAILS(ENOENT, UBTRFS_ERROR_FAILED, ubtrfs_device_open(other, 0, &device, &error));
  OK(ubtrfs_device_create(other, 256 << 20, &device, &error));
  OK(ubtrfs_device_close(device, &error));
}

int main(int argc, char **argv) {
  ubtrfs_fs *fs;
  EXPECT(argc == 2);
  OK(ubtrfs_make_in_memory(256 << 20, &fs, &error));
  errors(fs);
  names(fs);
  attributes(fs);
  files(fs);
  directories(fs);
  subvolumes(fs, argv[1]);
  archives(fs, argv[1]);
  OK(ubtrfs_close(fs, &error));
  devices();
  images(argv[1]);
  puts("done");
  return 0;
}
