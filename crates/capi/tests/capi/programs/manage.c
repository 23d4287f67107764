/*
 * Work on whole filesystems.
 *
 *   manage calls                 calls each function on filesystems in memory, and compares the results; prints "done"
 *   manage convert IMAGE OTHER   adds the new image OTHER, and keeps two copies of everything, on both
 *   manage scrub IMAGE OTHER     repairs bad copies, and prints the files that had some
 *   manage remove IMAGE OTHER    moves everything to the first image, and removes OTHER
 *   manage quota IMAGE           limits the subvolume /limited to 16 MiB, and meets the limit
 *
 * Images are devices of the program, whose functions read and write the files.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
#include "expect.h"

static const uint64_t MIB = 1 << 20;
static char content[8 << 20];

/* ---- Devices of the program. */
static int disk_read(void *user, void *data, size_t len, uint64_t offset) {
  char *to = (char *)data;
  while (len > 0) {
    ssize_t nr = pread(*(int *)user, to, len, (off_t)offset);
    if (nr <= 0) return nr == 0 ? -EIO : -errno;
    to += nr;
    len -= (size_t)nr;
    offset += (uint64_t)nr;
  }
  return 0;
}

static int disk_write(void *user, const void *data, size_t len, uint64_t offset) {
  const char *from = (const char *)data;
  while (len > 0) {
    ssize_t nr = pwrite(*(int *)user, from, len, (off_t)offset);
    if (nr < 0) return -errno;
    from += nr;
    len -= (size_t)nr;
    offset += (uint64_t)nr;
  }
  return 0;
}

static int disk_flush(void *user) {
  return fsync(*(int *)user) == 0 ? 0 : -errno;
}

static void disk_release(void *user) {
  close(*(int *)user);
  free(user);
}

/* A device over an image file, which is made if it does not exist. */
static ubtrfs_device *own_device(const char *path) {
  ubtrfs_device_options options = UBTRFS_DEVICE_OPTIONS_INIT;
  ubtrfs_device *device;
  int *file = (int *)malloc(sizeof *file);
  EXPECT(file != NULL);
  *file = open(path, O_RDWR | O_CREAT, 0600);
  EXPECT(*file >= 0);
  if (lseek(*file, 0, SEEK_END) == 0) EXPECT(ftruncate(*file, (off_t)(512 * MIB)) == 0);
  options.size_bytes = (uint64_t)lseek(*file, 0, SEEK_END);
  options.name = path;
  options.user = file;
  options.read_at = disk_read;
  options.write_at = disk_write;
  options.flush = disk_flush;
  options.release = disk_release;
  OK(ubtrfs_device_new(&options, &device, &error));
  return device;
}

/* Opens the filesystem on one or two images. */
static ubtrfs_fs *open_images(const char *first, const char *second) {
  ubtrfs_device *devices[2];
  ubtrfs_fs *fs;
  size_t i, nr = second == NULL ? 1 : 2;
  devices[0] = own_device(first);
  if (second != NULL) devices[1] = own_device(second);
  OK(ubtrfs_open_devices(devices, nr, NULL, &fs, &error));
  for (i = 0; i < nr; i++) OK(ubtrfs_device_close(devices[i], &error));
  return fs;
}

/* ---- Steps that all modes share. */

/* Converts data and tree blocks, and expects that nothing stays behind. */
static void convert(ubtrfs_fs *fs, const char *data_profile, const char *tree_profile) {
  ubtrfs_balance_filter data = UBTRFS_BALANCE_FILTER_INIT, tree = UBTRFS_BALANCE_FILTER_INIT;
  ubtrfs_balance_options options = UBTRFS_BALANCE_OPTIONS_INIT;
  ubtrfs_balance_report *report;
  ubtrfs_space_report *space;
  ubtrfs_progress progress;
  ubtrfs_job *job;
  size_t i;
  data.convert = data_profile;
  tree.convert = tree_profile;
  options.flags = UBTRFS_BALANCE_FORCE;
  options.data = &data;
  options.metadata = &tree;
  options.system = &tree;
  OK(ubtrfs_job_new(&job, &error));
  OK(ubtrfs_balance(fs, &options, job, &report, &error));
  EXPECT(report->nr_failures == 0 && report->failures == NULL);
  EXPECT(report->counts.completed == report->counts.expected && report->counts.completed >= 3);
  EXPECT(report->counts.failed == 0 && report->counts.without_space == 0);
  EXPECT(ubtrfs_free(report) == 0 && ubtrfs_free(report) == -EINVAL);
  OK(ubtrfs_job_progress(job, &progress, &error));
  EXPECT(progress.done > 0 && progress.done <= progress.total);
  OK(ubtrfs_job_close(job, &error));
  OK(ubtrfs_space(fs, &space, &error));
  EXPECT(space->nr_groups == 3);
  for (i = 0; i < space->nr_groups; i++) {
    const ubtrfs_group_usage *group = &space->groups[i];
    EXPECT(strcmp(group->profile, strcmp(group->kind, "data") == 0 ? data_profile : tree_profile) == 0);
    EXPECT(group->used_bytes <= group->total_bytes);
  }
  EXPECT(ubtrfs_free(space) == 0);
}

static void remove_device(ubtrfs_fs *fs, uint64_t devid) {
  ubtrfs_space_report *space;
  OK(ubtrfs_remove_devices(fs, &devid, 1, NULL, &error));
  OK(ubtrfs_space(fs, &space, &error));
  EXPECT(space->nr_devices == 1 && space->devices[0].devid != devid);
  EXPECT(ubtrfs_free(space) == 0);
}

static uint64_t subvolume_id(ubtrfs_fs *fs, const char *path) {
  ubtrfs_subvolume *subvolume;
  uint64_t id;
  OK(ubtrfs_subvolume_info(fs, path, &subvolume, &error));
  id = subvolume->id;
  ubtrfs_free(subvolume);
  return id;
}

/* ---- Calls on filesystems in memory. */
static ubtrfs_device *memory_device(uint64_t size) {
  ubtrfs_device *device;
  OK(ubtrfs_device_in_memory(size, &device, &error));
  return device;
}

static void devices(void) {
  ubtrfs_device *first = memory_device(512 * MIB), *second = memory_device(512 * MIB), *third = memory_device(768 * MIB);
  ubtrfs_replace_report *report;
  ubtrfs_space_report *space;
  ubtrfs_fs *fs;
  uint64_t devid, size, sum = 0;
  size_t i, len;
  void *data;
  OK(ubtrfs_make_devices(&first, 1, NULL, &error));
  OK(ubtrfs_open_devices(&first, 1, NULL, &fs, &error));
  OK(ubtrfs_write_file(fs, "/f", content, sizeof content, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_add_device(fs, NULL, NULL, &devid, &error));
  OK(ubtrfs_add_device(fs, second, NULL, &devid, &error));
  EXPECT(devid == 2);
  convert(fs, "raid1", "raid1");
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_remove_devices(fs, &devid, 1, NULL, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_remove_devices(fs, NULL, 1, NULL, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_remove_devices(fs, &devid, SIZE_MAX, NULL, &error));
  OK(ubtrfs_space(fs, &space, &error));
  EXPECT(space->nr_devices == 2 && space->reserve_bytes > 0 && space->reserve_used_bytes == 0);
  EXPECT(space->devices[1].devid == 2 && space->devices[1].state == UBTRFS_MEMBER_IN_SYNC);
  EXPECT(space->devices[1].path != NULL && space->devices[1].is_seed == 0 && space->devices[1].generation == 0);
  EXPECT(space->devices[1].total_bytes == 512 * MIB && space->devices[1].slack_bytes == 0);
  for (i = 0; i < space->devices[1].nr_shares; i++) {
    EXPECT(strcmp(space->devices[1].shares[i].profile, "raid1") == 0 && space->devices[1].shares[i].nr_stripes == 2);
    sum += space->devices[1].shares[i].bytes;
  }
  EXPECT(sum == space->devices[1].allocated_bytes && sum > 0);
  EXPECT(ubtrfs_free(space) == 0);

  OK(ubtrfs_replace_device(fs, 1, third, NULL, &report, &error));
  EXPECT(report->nr_files == 0 && report->files == NULL && report->lost_block_bytes == 0);
  EXPECT(report->counts.tree_blocks > 0 && report->counts.uncorrectable_errors == 0);
  EXPECT(ubtrfs_free(report) == 0);
  FAILS_SOMEHOW(ubtrfs_replace_device(fs, 7, first, NULL, NULL, &error));
  OK(ubtrfs_resize_device(fs, 1, 700 * MIB, NULL, &error));
  OK(ubtrfs_min_device_size(fs, 1, &size, &error));
  EXPECT(size > 0 && size <= 700 * MIB);
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_resize_device(fs, 1, 1, NULL, &error));
  FAILS_SOMEHOW(ubtrfs_resize_device(fs, 1, 2000 * MIB, NULL, &error));
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_min_device_size(fs, 9, &size, &error));
  convert(fs, "single", "dup");
  remove_device(fs, 2);
  OK(ubtrfs_read_file(fs, "/f", &data, &len, &error));
  EXPECT(len == sizeof content && memcmp(data, content, len) == 0 && ubtrfs_free(data) == 0);
  OK(ubtrfs_close(fs, &error));
  OK(ubtrfs_device_close(first, &error));
  OK(ubtrfs_device_close(second, &error));
  OK(ubtrfs_device_close(third, &error));
}

static void balances(ubtrfs_fs *fs) {
  static const char *const profiles[] = {"single", "dup"};
  ubtrfs_balance_filter filter = UBTRFS_BALANCE_FILTER_INIT;
  ubtrfs_balance_options options = UBTRFS_BALANCE_OPTIONS_INIT;
  ubtrfs_balance_report *report;
  ubtrfs_balance_state state;
  ubtrfs_job *job;
  OK(ubtrfs_balance(fs, NULL, NULL, &report, &error));
  EXPECT(report->counts.expected >= 3 && report->counts.completed == report->counts.expected);
  EXPECT(ubtrfs_free(report) == 0);
  OK(ubtrfs_balance(fs, NULL, NULL, NULL, &error));
  OK(ubtrfs_balance_status(fs, &state, &error));
  EXPECT(state.state == UBTRFS_BALANCE_NONE && state.is_cancelling == 0 && state.is_pausing == 0);
  FAILS(ENOTCONN, UBTRFS_ERROR_FAILED, ubtrfs_balance_pause(fs, &error));
  FAILS(ENOTCONN, UBTRFS_ERROR_FAILED, ubtrfs_balance_cancel(fs, &error));
  FAILS(ENOTCONN, UBTRFS_ERROR_FAILED, ubtrfs_balance_resume(fs, NULL, NULL, &error));
  /* No block group is on device 7, and none begins at address 0. */
  options.data = &filter;
  filter.devid = 7;
  OK(ubtrfs_balance(fs, &options, NULL, &report, &error));
  EXPECT(report->counts.completed == 0 && ubtrfs_free(report) == 0);
  filter.devid = 1;
  filter.usage_min = 1;
  filter.usage_max = 100;
  filter.profiles = profiles;
  filter.nr_profiles = 2;
  filter.limit = 1;
  filter.range_end = 4096;
  OK(ubtrfs_balance(fs, &options, NULL, &report, &error));
  EXPECT(report->counts.completed == 0 && ubtrfs_free(report) == 0);
  filter.usage_min = 5;
  filter.usage_max = 3;
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_balance(fs, &options, NULL, &report, &error));
  EXPECT(report == NULL);
  filter.usage_min = 0;
  filter.nr_profiles = 5000;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_balance(fs, &options, NULL, &report, &error));
  filter.nr_profiles = 0;
  filter.convert = "raid5";
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_balance(fs, &options, NULL, &report, &error));
  filter.convert = "raid1";
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_balance(fs, &options, NULL, &report, &error));
  filter.struct_size = 0;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_balance(fs, &options, NULL, &report, &error));
  OK(ubtrfs_job_new(&job, &error));
  EXPECT(ubtrfs_job_cancel(job) == 0);
  FAILS(ECANCELED, UBTRFS_ERROR_FAILED, ubtrfs_balance(fs, NULL, job, &report, &error));
  OK(ubtrfs_balance_status(fs, &state, &error));
  if (state.state == UBTRFS_BALANCE_PAUSED) OK(ubtrfs_balance_cancel(fs, &error));
  OK(ubtrfs_job_close(job, &error));
}

static void *balance_all(void *fs) {
  return (void *)(intptr_t)ubtrfs_balance((ubtrfs_fs *)fs, NULL, NULL, NULL, NULL);
}

/* Another thread pauses a balance, and it is resumed. */
static void pauses(ubtrfs_fs *fs) {
  ubtrfs_balance_state state = {UBTRFS_BALANCE_NONE, 0, 0, 0, {0, 0, 0, 0, 0, {0, 0, 0}}};
  pthread_t thread;
  void *ended;
  int status;
  EXPECT(pthread_create(&thread, NULL, balance_all, fs) == 0);
  while (state.state == UBTRFS_BALANCE_NONE) OK(ubtrfs_balance_status(fs, &state, &error));
  status = ubtrfs_balance_pause(fs, NULL);
  EXPECT(pthread_join(thread, &ended) == 0);
  OK(ubtrfs_balance_status(fs, &state, &error));
  if (status == 0) {
    EXPECT((intptr_t)ended == -ECANCELED && state.state == UBTRFS_BALANCE_PAUSED);
    FAILS(EINPROGRESS, UBTRFS_ERROR_FAILED, ubtrfs_balance(fs, NULL, NULL, NULL, &error));
    OK(ubtrfs_balance_resume(fs, NULL, NULL, &error));
  } else {
    /* It ended before. */
    EXPECT(status == -ENOTCONN && ended == NULL);
  }
  OK(ubtrfs_balance_status(fs, &state, &error));
  EXPECT(state.state == UBTRFS_BALANCE_NONE);
}

static void scrubs(ubtrfs_fs *fs) {
  ubtrfs_scrub_options options = UBTRFS_SCRUB_OPTIONS_INIT;
  ubtrfs_scrub_report *report;
  uint64_t devids[] = {1, 9};
  ubtrfs_job *job;
  OK(ubtrfs_scrub(fs, NULL, NULL, &report, &error));
  EXPECT(report->nr_devices == 1 && report->devices[0].devid == 1 && report->devices[0].status == 0);
  EXPECT(report->devices[0].message == NULL && report->devices[0].counts.data_bytes >= sizeof content);
  EXPECT(report->nr_files == 0 && report->files == NULL && report->lost_block_bytes == 0);
  EXPECT(ubtrfs_free(report) == 0 && ubtrfs_free(report) == -EINVAL);
  options.flags = UBTRFS_SCRUB_READ_ONLY;
  options.devids = devids;
  options.nr_devids = 1;
  options.bytes_per_sec = UINT64_C(1) << 40;
  OK(ubtrfs_scrub(fs, &options, NULL, &report, &error));
  EXPECT(report->nr_devices == 1 && ubtrfs_free(report) == 0);
  options.nr_devids = 2;
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_scrub(fs, &options, NULL, &report, &error));
  EXPECT(report == NULL);
  options.devids = NULL;
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_scrub(fs, &options, NULL, &report, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_scrub(fs, NULL, NULL, NULL, &error));
  FAILS(ENOTCONN, UBTRFS_ERROR_FAILED, ubtrfs_scrub_cancel(fs, &error));
  OK(ubtrfs_job_new(&job, &error));
  EXPECT(ubtrfs_job_cancel(job) == 0);
  /* So slow that it does not end before it learns that it is cancelled. */
  options.devids = NULL;
  options.nr_devids = 0;
  options.bytes_per_sec = 1 << 20;
  OK(ubtrfs_scrub(fs, &options, job, &report, &error));
  EXPECT(report->devices[0].status == -ECANCELED && report->devices[0].message[0] != 0);
  EXPECT(ubtrfs_free(report) == 0);
  OK(ubtrfs_job_close(job, &error));
}

static void quotas(ubtrfs_fs *fs) {
  const uint64_t group = (UINT64_C(1) << 48) + 7;
  ubtrfs_quota_state state;
  ubtrfs_qgroup *list;
  uint64_t home;
  size_t i, nr;
  int needs_rescan = -1, nr_found = 0;
  OK(ubtrfs_subvolume_create(fs, "/home", &error));
  home = subvolume_id(fs, "/home");
  OK(ubtrfs_quota_status(fs, &state, &error));
  EXPECT(state.kind == UBTRFS_QUOTA_OFF && state.is_consistent == 0 && state.is_counting == 0);
  FAILS(ENOTCONN, UBTRFS_ERROR_FAILED, ubtrfs_qgroup_list(fs, &list, &nr, &error));
  EXPECT(list == NULL && nr == 0);
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_quota_enable(fs, 3, &error));
  OK(ubtrfs_quota_enable(fs, UBTRFS_QUOTA_FULL, &error));
  OK(ubtrfs_quota_wait(fs, NULL, &error));
  OK(ubtrfs_quota_status(fs, &state, &error));
  EXPECT(state.kind == UBTRFS_QUOTA_FULL && state.is_consistent == 1 && state.is_counting == 0);
  OK(ubtrfs_write_file(fs, "/home/f", content, 1 << 20, &error));
  OK(ubtrfs_qgroup_create(fs, group, &error));
  FAILS(EEXIST, UBTRFS_ERROR_FAILED, ubtrfs_qgroup_create(fs, group, &error));
  OK(ubtrfs_qgroup_assign(fs, home, group, &needs_rescan, &error));
  EXPECT(needs_rescan == 0 || needs_rescan == 1);
  OK(ubtrfs_quota_rescan(fs, &error));
  OK(ubtrfs_quota_wait(fs, NULL, &error));
  OK(ubtrfs_qgroup_limit(fs, home, 4 * MIB, UBTRFS_NO_LIMIT, &error));
  FAILS(EDQUOT, UBTRFS_ERROR_FAILED, ubtrfs_write_file(fs, "/home/g", content, sizeof content, &error));
  OK(ubtrfs_sync(fs, &error));
  OK(ubtrfs_qgroup_list(fs, &list, &nr, &error));
  for (i = 0; i < nr; i++) {
    if (list[i].id == home) {
      nr_found++;
      EXPECT(list[i].max_referenced == 4 * MIB && list[i].max_exclusive == UBTRFS_NO_LIMIT);
      /* A tree block may be beyond the limit. */
      EXPECT(list[i].referenced >= MIB && list[i].referenced < 5 * MIB && list[i].nr_members == 0);
      EXPECT(list[i].nr_parents == 1 && list[i].parents[0] == group && list[i].members == NULL);
    } else if (list[i].id == group) {
      nr_found++;
      EXPECT(list[i].nr_members == 1 && list[i].members[0] == home && list[i].max_referenced == UBTRFS_NO_LIMIT);
    }
  }
  EXPECT(nr_found == 2 && ubtrfs_free(list) == 0);
  FAILS(EBUSY, UBTRFS_ERROR_FAILED, ubtrfs_qgroup_destroy(fs, group, &error));
  OK(ubtrfs_qgroup_remove(fs, home, group, NULL, &error));
  OK(ubtrfs_qgroup_destroy(fs, group, &error));
  FAILS(ENOENT, UBTRFS_ERROR_FAILED, ubtrfs_qgroup_destroy(fs, group, &error));
  OK(ubtrfs_quota_disable(fs, &error));
  OK(ubtrfs_quota_enable(fs, UBTRFS_QUOTA_SIMPLE, &error));
  OK(ubtrfs_quota_status(fs, &state, &error));
  EXPECT(state.kind == UBTRFS_QUOTA_SIMPLE);
  OK(ubtrfs_quota_disable(fs, &error));
}

static void extents(ubtrfs_fs *fs, ubtrfs_fs *other) {
  ubtrfs_defragment_options options = UBTRFS_DEFRAGMENT_OPTIONS_INIT;
  ubtrfs_file *a, *b, *foreign;
  ubtrfs_metadata st;
  uint64_t rewritten;
  int equal = -1;
  OK(ubtrfs_write_file(fs, "/a", content, 1 << 20, &error));
  OK(ubtrfs_write_file(fs, "/b", content, 1 << 20, &error));
  OK(ubtrfs_write_file(other, "/a", content, 1 << 20, &error));
  OK(ubtrfs_file_open(fs, "/a", UBTRFS_READ, 0, &a, &error));
  OK(ubtrfs_file_open(fs, "/b", UBTRFS_READ | UBTRFS_WRITE, 0, &b, &error));
  OK(ubtrfs_file_open(other, "/a", UBTRFS_READ | UBTRFS_WRITE, 0, &foreign, &error));
  OK(ubtrfs_file_dedupe_range(b, 0, a, 0, 1 << 20, NULL, &equal, &error));
  EXPECT(equal == 1);
  OK(ubtrfs_file_pwrite(b, "other", 5, 8192, &error));
  OK(ubtrfs_file_dedupe_range(b, 8192, a, 8192, 4096, NULL, &equal, &error));
  EXPECT(equal == 0);
  OK(ubtrfs_file_clone_range(b, 1 << 20, a, 0, 8192, &error));
  /* A range of the same file. */
  OK(ubtrfs_file_clone_range(b, 2 << 20, b, 0, 4096, &error));
  OK(ubtrfs_file_stat(b, &st, &error));
  EXPECT(st.size == (2 << 20) + 4096);
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_file_clone_range(b, 7, a, 0, 4096, &error));
  FAILS(EBADF, UBTRFS_ERROR_FAILED, ubtrfs_file_clone_range(a, 0, b, 0, 4096, &error));
  FAILS(EXDEV, UBTRFS_ERROR_FAILED, ubtrfs_file_clone_range(b, 0, foreign, 0, 4096, &error));
  FAILS(EXDEV, UBTRFS_ERROR_FAILED, ubtrfs_file_dedupe_range(foreign, 0, a, 0, 4096, NULL, &equal, &error));
  OK(ubtrfs_file_close(a, &error));
  OK(ubtrfs_file_close(b, &error));
  OK(ubtrfs_file_close(foreign, &error));
  options.flags = UBTRFS_DEFRAGMENT_UNSHARE;
  options.compress = "zstd:9";
  OK(ubtrfs_defragment(fs, "/b", &options, NULL, &rewritten, &error));
  EXPECT(rewritten >= 1 << 20);
  OK(ubtrfs_defragment(fs, "/f", NULL, NULL, NULL, &error));
  options.compress = "zstd,ro";
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_defragment(fs, "/b", &options, NULL, NULL, &error));
  options.compress = "none";
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_defragment(fs, "/b", &options, NULL, NULL, &error));
  FAILS(EISDIR, UBTRFS_ERROR_FAILED, ubtrfs_defragment(fs, "/", NULL, NULL, NULL, &error));
}

static void labels_and_trim(ubtrfs_fs *fs) {
  char too_long[257], *label;
  uint64_t bytes;
  memset(too_long, 'x', 256);
  too_long[256] = 0;
  OK(ubtrfs_set_label(fs, "from C", &error));
  OK(ubtrfs_label(fs, &label, &error));
  EXPECT(strcmp(label, "from C") == 0 && ubtrfs_free(label) == 0);
  FAILS(EINVAL, UBTRFS_ERROR_FAILED, ubtrfs_set_label(fs, too_long, &error));
  FAILS(EINVAL, UBTRFS_ERROR_USAGE, ubtrfs_set_label(fs, NULL, &error));
  OK(ubtrfs_trim(fs, 0, NULL, &bytes, &error));
  EXPECT(bytes > 100 * MIB);
  OK(ubtrfs_trim(fs, UINT64_MAX, NULL, NULL, &error));
}

static void all_calls(void) {
  ubtrfs_fs *fs, *other;
  devices();
  OK(ubtrfs_make_in_memory(1024 * MIB, &fs, &error));
  OK(ubtrfs_make_in_memory(256 * MIB, &other, &error));
  OK(ubtrfs_write_file(fs, "/f", content, sizeof content, &error));
  OK(ubtrfs_sync(fs, &error));
  balances(fs);
  pauses(fs);
  scrubs(fs);
  quotas(fs);
  extents(fs, other);
  labels_and_trim(fs);
  OK(ubtrfs_close(other, &error));
  OK(ubtrfs_close(fs, &error));
  puts("done");
}

/* ---- Images. */
static void convert_images(const char *first, const char *second) {
  ubtrfs_fs *fs = open_images(first, NULL);
  ubtrfs_device *device = own_device(second);
  uint64_t devid;
  OK(ubtrfs_add_device(fs, device, NULL, &devid, &error));
  OK(ubtrfs_device_close(device, &error));
  EXPECT(devid == 2);
  convert(fs, "raid1", "raid1");
  OK(ubtrfs_close(fs, &error));
}

static void scrub_images(const char *first, const char *second) {
  ubtrfs_fs *fs = open_images(first, second);
  ubtrfs_scrub_report *report;
  size_t i;
  OK(ubtrfs_scrub(fs, NULL, NULL, &report, &error));
  for (i = 0; i < report->nr_devices; i++) {
    const ubtrfs_scrubbed_device *device = &report->devices[i];
    EXPECT(device->status == 0 && device->counts.uncorrectable_errors == 0);
    printf("device %" PRIu64 ": %" PRIu64 " bad, %" PRIu64 " corrected\n", device->devid, device->counts.csum_errors,
           device->counts.corrected_errors);
  }
  for (i = 0; i < report->nr_files; i++) {
    const ubtrfs_damaged_file *file = &report->files[i];
    printf("%s: %" PRIu64 " bytes repaired, %" PRIu64 " lost\n", file->path, file->repaired_bytes, file->lost_bytes);
  }
  ubtrfs_free(report);
  OK(ubtrfs_close(fs, &error));
}

static void remove_image(const char *first, const char *second) {
  ubtrfs_fs *fs = open_images(first, second);
  FAILS(EOPNOTSUPP, UBTRFS_ERROR_FAILED, ubtrfs_trim(fs, 0, NULL, NULL, &error));
  convert(fs, "single", "dup");
  remove_device(fs, 2);
  OK(ubtrfs_close(fs, &error));
}

static void limit_image(const char *image) {
  ubtrfs_fs *fs = open_images(image, NULL);
  size_t written;
  char path[32];
  OK(ubtrfs_subvolume_create(fs, "/limited", &error));
  OK(ubtrfs_quota_enable(fs, UBTRFS_QUOTA_FULL, &error));
  OK(ubtrfs_quota_wait(fs, NULL, &error));
  OK(ubtrfs_qgroup_limit(fs, subvolume_id(fs, "/limited"), 16 * MIB, UBTRFS_NO_LIMIT, &error));
  for (written = 0; written < 16; written++) {
    snprintf(path, sizeof path, "/limited/%zu", written);
    if (ubtrfs_write_file(fs, path, content, 1 << 20, &error) != 0) break;
  }
  EXPECT(written >= 14 && written < 16 && ubtrfs_error_errno(error) == EDQUOT && ubtrfs_error_free(error) == 0);
  OK(ubtrfs_write_file(fs, "/beside", content, sizeof content, &error));
  OK(ubtrfs_close(fs, &error));
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  size_t i;
  for (i = 0; i < sizeof content; i++) content[i] = (char)(i / 4096 * 31 + i % 251);
  if (strcmp(mode, "calls") == 0) all_calls();
  else if (strcmp(mode, "convert") == 0 && argc == 4) convert_images(argv[2], argv[3]);
  else if (strcmp(mode, "scrub") == 0 && argc == 4) scrub_images(argv[2], argv[3]);
  else if (strcmp(mode, "remove") == 0 && argc == 4) remove_image(argv[2], argv[3]);
  else if (strcmp(mode, "quota") == 0 && argc == 3) limit_image(argv[2]);
  else return 2;
  return 0;
}
