/*
 * A bed of random calls with wrong arguments: bed FOLDER CALLS SEED
 *
 * Each call takes its arguments from pools that hold more wrong values than right ones: null pointers, closed handles,
 * handles of other kinds, numbers that are no handles, huge sizes, invalid names. Every call must end in a success or in
 * an error with a number and a message, and never in a panic. The program runs with AddressSanitizer, which finds wrong
 * accesses. The same seed gives the same calls.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ubtrfs.h>
#include <unistd.h>

static uint64_t state;
static unsigned long call, nr_ok, nr_failed, nr_usage;
static const char *function;

/* xorshift64*. */
static uint64_t next(void) {
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * UINT64_C(0x2545f4914f6cdd1d);
}

static size_t below(size_t limit) {
  return (size_t)((next() >> 16) % limit);
}

static int one_in(size_t n) {
  return below(n) == 0;
}

/* Whether most arguments of this call are right, so that the call gets far: every second one. */
static int is_mild;

/* Whether an argument is one that a right program would pass. */
static int is_right(void) {
  return is_mild && !one_in(25);
}

static void wrong(const char *what) {
  fprintf(stderr, "call %lu, %s: %s\n", call, function, what);
  abort();
}

/* ---- Handles, open and closed ones of each kind. */
enum { FS, FILE_, DIR_, JOB, DEVICE, KINDS, POOL = 8 };
static void *pools[KINDS][POOL];

static void *handle(int kind) {
  size_t tries;
  for (tries = 0; is_right() && tries < 20; tries++) {
    void *found = pools[kind][below(POOL)];
    if (found != NULL) return found;
  }
  switch (below(30)) {
  case 0: return NULL;
  case 1: return (void *)(uintptr_t)next();
  case 2: return (void *)(uintptr_t)below(0x20000);
  case 3: return (void *)&state;
  case 4: return pools[below(KINDS)][below(POOL)];
  default: return pools[kind][below(POOL)];
  }
}

static void close_handle(int kind, void *closed) {
  switch (kind) {
  case FS: ubtrfs_close((ubtrfs_fs *)closed, NULL); break;
  case FILE_: ubtrfs_file_close((ubtrfs_file *)closed, NULL); break;
  case DIR_: ubtrfs_dir_close((ubtrfs_dir *)closed, NULL); break;
  case JOB: ubtrfs_job_close((ubtrfs_job *)closed, NULL); break;
  default: ubtrfs_device_close((ubtrfs_device *)closed, NULL); break;
  }
}

/* Puts a handle into its pool, and closes the one that it replaces. */
static void keep(int kind, void *made) {
  void **place = &pools[kind][below(POOL)];
  if (made == NULL) return;
  close_handle(kind, *place);
  *place = made;
}

#define AN_FS ((ubtrfs_fs *)handle(FS))
#define A_FILE ((ubtrfs_file *)handle(FILE_))
#define A_DIR ((ubtrfs_dir *)handle(DIR_))
#define A_JOB ((ubtrfs_job *)handle(JOB))
#define A_DEVICE ((ubtrfs_device *)handle(DEVICE))

/* ---- Texts. */
static char long_name[300], long_path[6000];

/* A path in a filesystem. */
static const char *path(void) {
  static const char *const paths[] = {
      "/",     "",         "/",      "/f",        "/g",       "/d",        "/d/f",       "/d/d",      "/link",
      "/s",    "/s/f",     "/u",     "/d/d/d/d",  "/s/d",     "/t",        "/t/f",       "f",         "/loop",     ".",
      "..",    "/..",      "/../f",  "/d/.",      "/d/..",    "//d//f//",  "/missing/x", "/\xff\xfe", "/d/\xc3\x28",
      "/f/x",  "/\n\t\x7f", "/ ",    "/loop/loop", "/link/x", "/s/../t/f", "C:\\x",      "/%s%n",
  };
  if (is_right()) return paths[2 + below(10)];
  switch (below(20)) {
  case 0: return NULL;
  case 1: return long_name;
  case 2: return long_path;
  default: return paths[below(sizeof paths / sizeof *paths)];
  }
}

/* A path of the host, always in the folder of the test. */
static const char *host_path(void) {
  static const char *const paths[] = {"image", "image2", "missing/image", "", "image/x", "\xff", "."};
  if (is_right()) return paths[below(2)];
  return one_in(10) ? NULL : one_in(10) ? long_path : paths[below(sizeof paths / sizeof *paths)];
}

static const char *word(void) {
  static const char *const words[] = {
      "",      "crc32c", "xxhash", "blake2",       "sha256", "single", "dup",  "raid1", "raid5",    "x", "\xff",
      "label", "user.a", "user.b", "security.x",   "user.",  "nonsense.a",     "system.posix_acl_access",
      "noatime", "compress=zstd", "subvolid=5", "compress=zstd:99,rw", "ro", "0123456789abcdef0123456789abcdef",
  };
  return one_in(8) ? NULL : one_in(20) ? long_name : one_in(40) ? long_path : words[below(sizeof words / sizeof *words)];
}

static const char *xattr(void) {
  static const char *const names[] = {"user.a", "user.b", "trusted.c", "security.d"};
  return is_right() ? names[below(4)] : word();
}

/* ---- Numbers. */
static uint64_t number(void) {
  if (is_right()) return below(1 << 20);
  static const uint64_t edges[] = {
      0, 1, 4095, 4096, 4097, 65536, 1 << 20, UINT64_C(1) << 31, UINT64_C(1) << 32, UINT64_C(1) << 50,
      UINT64_C(1) << 62, INT64_MAX - 4096, INT64_MAX - 1, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX - 1, UINT64_MAX,
  };
  return one_in(3) ? next() >> below(64) : edges[below(sizeof edges / sizeof *edges)];
}

/* A size of a file: small, or so large that memory cannot hold it. */
static uint64_t file_size(void) {
  return one_in(4) ? (UINT64_C(1) << 50) + (next() >> 1) : below(1 << 20);
}

static char buffer[1 << 16];

/* A length of data that is in the buffer, or that no memory has. */
static size_t length(void) {
  return one_in(10) ? SIZE_MAX - below(4096) : one_in(10) ? (SIZE_MAX >> 1) + 1 + below(4096) : below(sizeof buffer + 1);
}

/* A room for reading. It may be larger than the buffer if files are smaller. */
static size_t room(void) {
  return one_in(10) ? SIZE_MAX - below(4096) : below(sizeof buffer + 1);
}

static void *bytes(void) {
  return one_in(8) ? NULL : buffer;
}

static uint32_t flags(void) {
  return one_in(10) ? (uint32_t)next() : (uint32_t)below(64);
}

/* ---- Memory of the library. */
static void *memory[16];

static void keep_memory(void *made) {
  if (made != NULL) {
    void **place = &memory[below(16)];
    ubtrfs_free(*place);
    *place = made;
  }
}

/* ---- Results. */
static ubtrfs_error *errors[16];
static ubtrfs_error *error;

static ubtrfs_error **place(void) {
  error = NULL;
  return one_in(8) ? NULL : &error;
}

/* How often each function succeeded and failed. */
static struct {
  const char *name;
  unsigned long nr_ok, nr_failed;
} functions[200];

static void count(int status) {
  size_t i = 0;
  while (functions[i].name != NULL && strcmp(functions[i].name, function) != 0) i++;
  functions[i].name = function;
  *(status == 0 ? &functions[i].nr_ok : &functions[i].nr_failed) += 1;
}

static void judge(int status) {
  count(status);
  if (status == 0) {
    nr_ok++;
    if (error != NULL) wrong("a success has an error");
    return;
  }
  nr_failed++;
  if (status > 0 || status < -4095) wrong("the status is no errno");
  if (error == NULL) return;
  if (ubtrfs_error_errno(error) != -status) wrong("the error has another number");
  if (ubtrfs_error_message(error)[0] == 0) wrong("the error has no message");
  if (strlen(ubtrfs_error_path(error)) + strlen(ubtrfs_error_operation(error)) > 20000) wrong("the texts are long");
  switch (ubtrfs_error_kind(error)) {
  case UBTRFS_ERROR_USAGE: nr_usage++; break;
  case UBTRFS_ERROR_FAILED:
  case UBTRFS_ERROR_CORRUPTION: break;
  default: wrong(ubtrfs_error_message(error));
  }
  errors[below(16)] = error;
  /* Most are freed here, and some later or twice. */
  if (!one_in(4)) ubtrfs_error_free(error);
}

/* ---- Functions of the program. */
static size_t budget;

static int write_some(void *user, const void *data, size_t len) {
  (void)user;
  if (len > 0 && memchr(data, 0, len) == data && len == 1) return 0;
  if (len > budget) return one_in(2) ? -EPIPE : -100000;
  budget -= len;
  return 0;
}

static char stream[1 << 20];
static size_t stream_len, stream_at;

static int write_stream(void *user, const void *data, size_t len) {
  (void)user;
  if (len > sizeof stream - stream_len) return -ENOSPC;
  memcpy(stream + stream_len, data, len);
  stream_len += len;
  return 0;
}

static int read_stream(void *user, void *data, size_t len, size_t *nr_read) {
  (void)user;
  *nr_read = stream_len - stream_at < len ? stream_len - stream_at : len;
  memcpy(data, stream + stream_at, *nr_read);
  stream_at += *nr_read;
  if (is_right()) return 0;
  if (one_in(50)) *nr_read = SIZE_MAX;
  return one_in(50) ? -EIO : 0;
}

static void tell(void *user, const ubtrfs_problem *problem) {
  (void)user;
  if (strlen(problem->code) < 3 || strlen(problem->text) < 5) wrong("a problem has no text");
}

struct disk {
  char *bytes;
  int releases;
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
  (void)user;
  return 0;
}

static int refuse(void *user) {
  (void)user;
  return 17;
}

static void release_disk(void *user) {
  struct disk *disk = (struct disk *)user;
  if (++disk->releases != 1) wrong("a device is released twice");
  free(disk->bytes);
  free(disk);
}

/* ---- Options. */
static ubtrfs_open_options *open_options(ubtrfs_open_options *options) {
  static const char *devices[3];
  ubtrfs_open_options made = UBTRFS_OPEN_OPTIONS_INIT;
  if (one_in(3)) return NULL;
  devices[0] = host_path();
  devices[1] = host_path();
  if (one_in(20)) made.struct_size = (size_t)number() < 4096 ? 3 : (size_t)number();
  if (made.struct_size > sizeof made && made.struct_size <= 4096) made.struct_size = sizeof made;
  made.flags = one_in(4) ? flags() : 0;
  if (one_in(4)) made.mount_options = word();
  if (one_in(4)) made.subvolume = path();
  if (one_in(8)) made.devices = devices;
  if (one_in(8)) made.nr_devices = one_in(4) ? UINT32_MAX : made.devices != NULL ? (uint32_t)below(3) : 1;
  if (made.nr_devices == UINT32_MAX && made.devices == NULL) made.nr_devices = 7;
  if (one_in(4)) made.memory_bytes = number();
  if (is_mild) made.mount_options = made.subvolume = NULL;
  if (is_mild) made.nr_devices = 0;
  if (is_mild) made.memory_bytes = 0;
  *options = made;
  return options;
}

static ubtrfs_mkfs_options *mkfs_options(ubtrfs_mkfs_options *options) {
  ubtrfs_mkfs_options made = UBTRFS_MKFS_OPTIONS_INIT;
  if (one_in(3)) return NULL;
  made.flags = one_in(4) ? flags() : UBTRFS_MKFS_FORCE;
  if (one_in(6)) made.nodesize = (uint32_t)number();
  if (one_in(6)) made.sectorsize = (uint32_t)number();
  if (one_in(6)) made.nanoseconds = (uint32_t)number();
  if (one_in(6)) made.seconds = (int64_t)number();
  if (one_in(4)) made.label = word();
  if (one_in(4)) made.csum = word();
  if (one_in(8)) made.uuid = word();
  if (one_in(8)) made.data_profile = word();
  if (one_in(8)) made.metadata_profile = word();
  if (is_mild) made.nodesize = made.sectorsize = made.nanoseconds = 0;
  if (is_mild) made.csum = made.uuid = made.data_profile = made.metadata_profile = NULL;
  if (is_mild) made.flags = UBTRFS_MKFS_FORCE;
  *options = made;
  return options;
}

/* ---- Calls. */
#define CALL(name, ...)                                                        \
  do {                                                                         \
    function = #name;                                                          \
    judge(name(__VA_ARGS__, place()));                                         \
  } while (0)

static void call_filesystem(void) {
  ubtrfs_open_options open;
  ubtrfs_mkfs_options mkfs;
  ubtrfs_space_usage usage;
  ubtrfs_fs *fs = NULL;
  ubtrfs_device *devices[3];
  ubtrfs_check_report report;
  const char *paths[2];
  char *text = NULL;
  switch (below(40)) {
  case 0: CALL(ubtrfs_open, host_path(), open_options(&open), one_in(9) ? NULL : &fs); keep(FS, fs); break;
  case 1: {
    uint64_t size = one_in(3) && !is_mild ? number() : (uint64_t)(128 << 20);
    if (is_mild) unlink("image");
    CALL(ubtrfs_make, host_path(), size, mkfs_options(&mkfs), open_options(&open), one_in(9) ? NULL : &fs);
    keep(FS, fs);
    /* Mostly closed at once, so that other calls open the image. */
    if (!one_in(4)) ubtrfs_close(fs, NULL);
    if (one_in(2)) unlink("image");
    break;
  }
  case 2: CALL(ubtrfs_make_in_memory, one_in(2) && !is_mild ? number() : (uint64_t)(128 << 20), &fs); keep(FS, fs); break;
  case 3:
  case 4:
    devices[0] = A_DEVICE;
    devices[1] = A_DEVICE;
    devices[2] = A_DEVICE;
    if (one_in(2)) {
      CALL(ubtrfs_make_devices, one_in(9) ? NULL : devices, is_right() ? 1 : one_in(9) ? SIZE_MAX : below(4), mkfs_options(&mkfs));
    } else if (one_in(2)) {
      CALL(ubtrfs_open_devices, one_in(9) ? NULL : devices, is_right() ? 1 : one_in(9) ? SIZE_MAX : below(4), open_options(&open), &fs);
      keep(FS, fs);
    } else {
      CALL(ubtrfs_check_devices, devices, is_right() ? 1 : below(4), one_in(4) ? flags() : 0, one_in(2) ? NULL : tell, NULL,
           one_in(3) ? A_JOB : NULL, one_in(2) ? NULL : &report);
    }
    break;
  case 5:
    paths[0] = host_path();
    paths[1] = host_path();
    CALL(ubtrfs_check, one_in(9) ? NULL : paths, one_in(9) ? SIZE_MAX : below(3), one_in(4) ? flags() : 0, tell, NULL,
         one_in(3) ? A_JOB : NULL, one_in(2) ? NULL : &report);
    break;
  case 6: CALL(ubtrfs_with_owner, AN_FS, (uint32_t)number(), (uint32_t)number(), flags(), &fs); keep(FS, fs); break;
  case 7: if (one_in(20)) CALL(ubtrfs_close, AN_FS); break;
  case 8: if (one_in(2)) CALL(ubtrfs_fs_release, AN_FS); break;
  case 9: if (one_in(4)) CALL(ubtrfs_begin, AN_FS); break;
  case 10:
  case 11: CALL(ubtrfs_commit, AN_FS); break;
  case 12: if (one_in(60)) CALL(ubtrfs_abort, AN_FS); break;
  case 13: if (one_in(4)) CALL(ubtrfs_sync, AN_FS); break;
  case 14: CALL(ubtrfs_label, AN_FS, one_in(9) ? NULL : &text); keep_memory(text); break;
  case 15: CALL(ubtrfs_read_only_reason, AN_FS, one_in(9) ? NULL : &text); keep_memory(text); break;
  default: CALL(ubtrfs_usage, AN_FS, one_in(9) ? NULL : &usage); break;
  }
}

static void call_device(void) {
  ubtrfs_device_options options = UBTRFS_DEVICE_OPTIONS_INIT;
  ubtrfs_device *device = NULL;
  uint64_t size;
  switch (below(12)) {
  case 0:
    if (one_in(8)) {
      struct disk *disk = (struct disk *)calloc(1, sizeof *disk);
      int status;
      if (disk == NULL) exit(3);
      options.size_bytes = one_in(4) ? below(1 << 20) : 116 << 20;
      disk->bytes = (char *)calloc(1, options.size_bytes);
      options.user = disk;
      options.flags = one_in(8) ? flags() : 0;
      options.name = word();
      if (!one_in(10)) options.read_at = read_disk;
      if (!one_in(10)) options.write_at = write_disk;
      if (!one_in(10)) options.flush = one_in(5) ? refuse : flush_disk;
      options.release = release_disk;
      function = "ubtrfs_device_new";
      status = ubtrfs_device_new(&options, &device, place());
      judge(status);
      if (status != 0) {
        free(disk->bytes);
        free(disk);
      }
      keep(DEVICE, device);
    } else {
      CALL(ubtrfs_device_new, one_in(2) ? NULL : &options, one_in(4) ? NULL : &device);
      keep(DEVICE, device);
    }
    break;
  case 1: CALL(ubtrfs_device_in_memory, one_in(3) && !is_mild ? number() : (uint64_t)(128 << 20), &device); keep(DEVICE, device); break;
  case 2: CALL(ubtrfs_device_open, host_path(), flags() & 3, one_in(9) ? NULL : &device); keep(DEVICE, device); break;
  case 3:
    CALL(ubtrfs_device_create, host_path(), number(), &device);
    keep(DEVICE, device);
    unlink("image");
    unlink("image2");
    unlink("\xff");
    break;
  case 4:
  case 5: CALL(ubtrfs_device_close, A_DEVICE); break;
  default: CALL(ubtrfs_device_size, A_DEVICE, one_in(9) ? NULL : &size); break;
  }
}

static void call_names(void) {
  char *text = NULL;
  int exists;
  switch (below(12)) {
  case 0: CALL(ubtrfs_mkdir, AN_FS, path()); break;
  case 1: CALL(ubtrfs_mkdir_all, AN_FS, path()); break;
  case 2: CALL(ubtrfs_rename, AN_FS, path(), path()); break;
  case 3: CALL(ubtrfs_unlink, AN_FS, path()); break;
  case 4: CALL(ubtrfs_rmdir, AN_FS, path()); break;
  case 5: if (one_in(8)) CALL(ubtrfs_remove_all, AN_FS, path()); break;
  case 6: CALL(ubtrfs_link, AN_FS, path(), path()); break;
  case 7: CALL(ubtrfs_symlink, AN_FS, path(), path()); break;
  case 8: CALL(ubtrfs_readlink, AN_FS, path(), one_in(9) ? NULL : &text); keep_memory(text); break;
  case 9: CALL(ubtrfs_reflink, AN_FS, path(), path()); break;
  case 10: CALL(ubtrfs_mknod, AN_FS, path(), one_in(2) ? 0010600 : (uint32_t)next(), (uint32_t)number(), (uint32_t)number()); break;
  default: CALL(ubtrfs_exists, AN_FS, path(), one_in(9) ? NULL : &exists); break;
  }
}

static void call_attributes(void) {
  ubtrfs_times times = UBTRFS_TIMES_INIT;
  ubtrfs_metadata st;
  char *names = NULL;
  void *value = NULL;
  size_t len;
  switch (below(9)) {
  case 0: CALL(ubtrfs_stat, AN_FS, path(), one_in(9) ? NULL : &st); break;
  case 1: CALL(ubtrfs_lstat, AN_FS, path(), one_in(9) ? NULL : &st); break;
  case 2: CALL(ubtrfs_chmod, AN_FS, path(), one_in(4) ? (uint32_t)next() : (uint32_t)below(010000)); break;
  case 3: CALL(ubtrfs_chown, AN_FS, path(), (uint32_t)number(), (uint32_t)number(), one_in(4) ? flags() : 0); break;
  case 4:
    times.accessed.seconds = (int64_t)number();
    times.accessed.nanoseconds = (uint32_t)number();
    times.accessed.is_set = (uint32_t)below(3);
    times.created = times.accessed;
    times.modified.seconds = (int64_t)number();
    times.modified.is_set = 1;
    if (one_in(10)) times.struct_size = one_in(2) ? 1 : 16;
    CALL(ubtrfs_utimes, AN_FS, path(), one_in(9) ? NULL : &times, one_in(4) ? flags() : 0);
    break;
  case 5:
    CALL(ubtrfs_getxattr, AN_FS, path(), xattr(), one_in(9) ? NULL : &value, one_in(9) ? NULL : &len);
    keep_memory(value);
    break;
  case 6:
    CALL(ubtrfs_listxattr, AN_FS, path(), one_in(9) ? NULL : &names, one_in(9) ? NULL : &len);
    keep_memory(names);
    break;
  case 7: CALL(ubtrfs_setxattr, AN_FS, path(), xattr(), bytes(), one_in(4) ? length() : below(3000)); break;
  default: CALL(ubtrfs_removexattr, AN_FS, path(), xattr()); break;
  }
}

static void call_file(void) {
  ubtrfs_file *file = NULL;
  ubtrfs_metadata st;
  uint64_t start, end;
  void *data = NULL;
  size_t len;
  switch (below(16)) {
  case 0:
  case 1:
  case 2:
    CALL(ubtrfs_file_open, AN_FS, path(), flags(), one_in(2) ? UBTRFS_DEFAULT_MODE : (uint32_t)below(020000),
         one_in(9) ? NULL : &file);
    keep(FILE_, file);
    break;
  case 3: CALL(ubtrfs_file_pread, A_FILE, bytes(), room() & 0xffff, number(), one_in(9) ? NULL : &len); break;
  case 4: {
    /* The size decides how many bytes are read. */
    ubtrfs_file *known = A_FILE;
    if (ubtrfs_file_stat(known, &st, NULL) == 0 && st.size <= sizeof buffer) {
      CALL(ubtrfs_file_pread, known, buffer, (SIZE_MAX >> 1) - below(4096) - (uintptr_t)(one_in(2) ? 0 : 4096), number(), &len);
    } else {
      CALL(ubtrfs_file_read, known, bytes(), one_in(4) ? SIZE_MAX - below(4096) : below(sizeof buffer), &len);
    }
    break;
  }
  case 5: CALL(ubtrfs_file_pwrite, A_FILE, bytes(), length(), number()); break;
  case 6: CALL(ubtrfs_file_write, A_FILE, bytes(), length()); break;
  case 7: CALL(ubtrfs_file_seek, A_FILE, (int64_t)number(), one_in(8) ? flags() : (uint32_t)below(3), one_in(2) ? NULL : &start); break;
  case 8: CALL(ubtrfs_file_next_data, A_FILE, number(), one_in(9) ? NULL : &start, one_in(9) ? NULL : &end); break;
  case 9: CALL(ubtrfs_file_truncate, A_FILE, file_size()); break;
  case 10: if (one_in(4)) CALL(ubtrfs_file_sync, A_FILE); break;
  case 11: if (one_in(4)) CALL(ubtrfs_file_sync_data, A_FILE); break;
  case 12: CALL(ubtrfs_file_stat, A_FILE, one_in(9) ? NULL : &st); break;
  case 13: CALL(ubtrfs_file_close, A_FILE); break;
  case 14:
    CALL(ubtrfs_read_file, AN_FS, path(), one_in(9) ? NULL : &data, one_in(9) ? NULL : &len);
    keep_memory(data);
    break;
  default: CALL(ubtrfs_write_file, AN_FS, path(), bytes(), length()); break;
  }
}

static void call_directory(void) {
  const ubtrfs_dir_entry *entry = NULL;
  ubtrfs_metadata st;
  ubtrfs_dir *dir = NULL;
  switch (below(6)) {
  case 0: CALL(ubtrfs_dir_open, AN_FS, path(), one_in(9) ? NULL : &dir); keep(DIR_, dir); break;
  case 1: CALL(ubtrfs_dir_close, A_DIR); break;
  case 2: CALL(ubtrfs_dir_stat, A_DIR, one_in(9) ? NULL : &st); break;
  default:
    CALL(ubtrfs_dir_next, A_DIR, one_in(9) ? NULL : &entry);
    if (entry != NULL && strlen(entry->name) != entry->name_len) wrong("a name has another length");
    break;
  }
}

static void call_subvolume(void) {
  ubtrfs_subvolume *list = NULL;
  size_t nr = 0, i;
  switch (below(13)) {
  case 0: CALL(ubtrfs_subvolume_create, AN_FS, path()); break;
  case 1: CALL(ubtrfs_snapshot, AN_FS, path(), path(), one_in(4) ? flags() : (uint32_t)below(2)); break;
  case 2: CALL(ubtrfs_subvolume_delete, AN_FS, path()); break;
  case 3: CALL(ubtrfs_subvolume_set_read_only, AN_FS, path(), (int)below(3) - 1); break;
  case 4: CALL(ubtrfs_subvolume_set_default, AN_FS, path()); break;
  case 5:
  case 6: CALL(ubtrfs_subvolume_info, AN_FS, path(), one_in(9) ? NULL : &list); keep_memory(list); break;
  default:
    CALL(ubtrfs_subvolume_list, AN_FS, one_in(9) ? NULL : &list, one_in(9) ? NULL : &nr);
    for (i = 0; list != NULL && i < nr; i++) {
      /* The path is read to its end, which can be far. */
      if (strlen(list[i].path) == SIZE_MAX || list[i].id == 0) wrong("a subvolume has no path or id");
    }
    keep_memory(list);
    break;
  }
}

static void call_stream(void) {
  static const char *sources[2];
  ubtrfs_send_options options = UBTRFS_SEND_OPTIONS_INIT;
  ubtrfs_receive_report report;
  ubtrfs_progress progress;
  ubtrfs_job *job = NULL;
  int fds[2];
  budget = below(1 << 20);
  options.flags = one_in(4) ? flags() : 0;
  options.version = (uint32_t)below(4);
  if (one_in(2)) options.parent = path();
  if (one_in(4)) options.clone_sources = sources;
  sources[0] = path();
  sources[1] = path();
  options.nr_clone_sources = one_in(4) ? below(3) : one_in(4) ? SIZE_MAX : 0;
  switch (below(12)) {
  case 0: CALL(ubtrfs_job_new, one_in(9) ? NULL : &job); keep(JOB, job); break;
  case 1: CALL(ubtrfs_job_close, A_JOB); break;
  case 2:
    error = NULL;
    function = "ubtrfs_job_pause";
    job = A_JOB;
    judge(ubtrfs_job_pause(job, 1));
    judge(ubtrfs_job_pause(job, 0));
    if (one_in(4)) judge(ubtrfs_job_cancel(job));
    break;
  case 3:
    stream_len = 0;
    CALL(ubtrfs_send, AN_FS, is_right() ? "/u" : path(), is_mild || one_in(3) ? NULL : &options, write_stream, NULL,
         is_mild || one_in(2) ? NULL : A_JOB);
    if (!is_right()) break;
    stream_at = 0;
    CALL(ubtrfs_receive, AN_FS, "/d", 0, read_stream, NULL, NULL, &report);
    break;
  case 4:
    CALL(ubtrfs_send, AN_FS, path(), one_in(3) ? NULL : &options, one_in(6) ? NULL : write_some, NULL, NULL);
    break;
  case 5:
    function = "ubtrfs_send_fd";
    fds[0] = one_in(2) ? -1 : open("stream", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CALL(ubtrfs_send_fd, AN_FS, one_in(2) ? path() : "/u", NULL, one_in(6) ? 9999 : fds[0], NULL);
    if (fds[0] >= 0) close(fds[0]);
    break;
  case 6:
    fds[0] = one_in(4) ? -1 : open("stream", O_RDONLY);
    CALL(ubtrfs_receive_fd, AN_FS, path(), flags(), fds[0], NULL, NULL);
    if (fds[0] >= 0) close(fds[0]);
    break;
  case 7:
  case 8:
    /* Also damaged streams. */
    if (one_in(3) && !is_right() && stream_len > 0) stream[below(stream_len)] ^= (char)(1 << below(8));
    stream_at = 0;
    CALL(ubtrfs_receive, AN_FS, path(), one_in(4) ? flags() : 0, one_in(9) ? NULL : read_stream, NULL,
         one_in(2) ? NULL : A_JOB, one_in(2) ? NULL : &report);
    break;
  case 9: CALL(ubtrfs_job_wait, A_JOB, 0, one_in(9) ? NULL : &progress); break;
  default: CALL(ubtrfs_job_progress, A_JOB, one_in(9) ? NULL : &progress); break;
  }
}

static void message(void *user, const char *text) {
  (void)user;
  if (text[0] == 0) wrong("a message is empty");
}

static void call_archive(void) {
  static const char *exclude[2];
  ubtrfs_import_options in = UBTRFS_IMPORT_OPTIONS_INIT;
  ubtrfs_export_options out = UBTRFS_EXPORT_OPTIONS_INIT;
  ubtrfs_archive_report report;
  const char *from = one_in(2) ? path() : "/d";
  budget = below(1 << 20);
  in.flags = one_in(4) ? flags() : 0;
  in.strip_components = one_in(4) ? (uint32_t)number() : 0;
  in.tell = one_in(2) ? NULL : message;
  out.flags = one_in(4) ? flags() : (uint32_t)below(4);
  out.tell = in.tell;
  exclude[0] = word();
  exclude[1] = path();
  if (one_in(4)) in.exclude = exclude;
  in.nr_exclude = one_in(2) ? 0 : one_in(8) ? SIZE_MAX : below(3);
  switch (below(6)) {
  case 0:
    stream_len = 0;
    CALL(ubtrfs_export, AN_FS, from, one_in(2) ? NULL : &out, write_stream, NULL, one_in(2) ? NULL : &report);
    break;
  case 1:
    CALL(ubtrfs_export, AN_FS, from, one_in(2) ? NULL : &out, one_in(6) ? NULL : write_some, NULL, NULL);
    break;
  case 2:
    CALL(ubtrfs_export_fd, AN_FS, from, &out, one_in(2) ? -1 : 9999, &report);
    CALL(ubtrfs_import_fd, AN_FS, path(), &in, one_in(2) ? -1 : 9999, &report);
    break;
  default:
    if (one_in(3) && !is_right() && stream_len > 0) stream[below(stream_len)] ^= (char)(1 << below(8));
    stream_at = 0;
    CALL(ubtrfs_import, AN_FS, path(), one_in(2) ? NULL : &in, one_in(9) ? NULL : read_stream, NULL,
         one_in(2) ? NULL : &report);
    break;
  }
}

#include "bed_manage.h"

static void call_rest(void) {
  void *freed;
  size_t at = below(16);
  error = NULL;
  switch (below(4)) {
  case 0:
    function = "ubtrfs_error_free";
    judge(ubtrfs_error_free(one_in(4) ? (ubtrfs_error *)handle((int)below(KINDS)) : errors[at]));
    break;
  case 1:
    function = "ubtrfs_error_message";
    if (ubtrfs_error_message(one_in(2) ? errors[at] : (ubtrfs_error *)handle(FS)) == NULL) wrong("no message");
    break;
  default:
    function = "ubtrfs_free";
    freed = one_in(2) ? memory[at] : one_in(2) ? handle(FS) : (void *)&at;
    judge(ubtrfs_free(freed));
    break;
  }
}

/* Closes everything, and begins with a new filesystem. */
static void begin_round(void) {
  size_t kind, i;
  for (kind = 0; kind < KINDS; kind++) {
    for (i = 0; i < POOL; i++) close_handle((int)kind, pools[kind][i]);
  }
  for (i = 0; i < 16; i++) {
    ubtrfs_free(memory[i]);
    ubtrfs_error_free(errors[i]);
  }
  for (i = 0; i < 3; i++) {
    ubtrfs_device *device = NULL;
    ubtrfs_job *job = NULL;
    ubtrfs_device_in_memory(128 << 20, &device, NULL);
    ubtrfs_make_devices(&device, 1, NULL, NULL);
    ubtrfs_job_new(&job, NULL);
    pools[DEVICE][i] = device;
    pools[JOB][i] = job;
  }
  for (i = 0; i < 5; i++) {
    ubtrfs_fs *fs;
    if (ubtrfs_make_in_memory(256 << 20, &fs, NULL) != 0) exit(3);
    ubtrfs_mkdir_all(fs, "/d/d", NULL);
    ubtrfs_write_file(fs, "/f", buffer, 5000, NULL);
    ubtrfs_write_file(fs, "/d/f", buffer, 50, NULL);
    ubtrfs_symlink(fs, "d/f", "/link", NULL);
    ubtrfs_symlink(fs, "loop", "/loop", NULL);
    ubtrfs_subvolume_create(fs, "/s", NULL);
    ubtrfs_setxattr(fs, "/f", "user.a", buffer, 10, NULL);
    ubtrfs_write_file(fs, "/s/f", buffer, 20000, NULL);
    ubtrfs_snapshot(fs, "/s", "/u", UBTRFS_SNAPSHOT_READ_ONLY, NULL);
    if (i < 2) ubtrfs_quota_enable(fs, UBTRFS_QUOTA_FULL, NULL);
    pools[FS][i] = fs;
    /* The others stay closed handles. */
    for (kind = FILE_; kind <= DIR_ && i < 2; kind++) {
      ubtrfs_file *file = NULL;
      ubtrfs_dir *dir = NULL;
      if (kind == FILE_) ubtrfs_file_open(fs, "/f", UBTRFS_READ | UBTRFS_WRITE, 0, &file, NULL);
      if (kind == DIR_) ubtrfs_dir_open(fs, "/", &dir, NULL);
      pools[kind][i] = kind == FILE_ ? (void *)file : (void *)dir;
    }
  }
}

int main(int argc, char **argv) {
  unsigned long calls;
  if (argc != 4 || chdir(argv[1]) != 0) {
    fprintf(stderr, "usage: bed FOLDER CALLS SEED\n");
    return 2;
  }
  calls = strtoul(argv[2], NULL, 10);
  state = strtoull(argv[3], NULL, 10) * 2 + 1;
  memset(long_name, 'n', sizeof long_name - 1);
  for (size_t i = 0; i < sizeof long_path - 1; i++) long_path[i] = i % 50 == 0 ? '/' : 'p';
  for (call = 0; call < calls; call++) {
    is_mild = 0;
    if (call % 2000 == 0) begin_round();
    is_mild = one_in(2);
    switch (below(16)) {
    case 0:
    case 1: call_filesystem(); break;
    case 2: call_device(); break;
    case 3:
    case 4: call_names(); break;
    case 5:
    case 6: call_attributes(); break;
    case 7:
    case 8:
    case 9: call_file(); break;
    case 10:
    case 11: call_directory(); break;
    case 12: if (one_in(2)) call_manage(); else call_subvolume(); break;
    case 13: if (one_in(3)) call_archive(); else call_stream(); break;
    default: call_rest(); break;
    }
  }
  is_mild = 0;
  begin_round();
  for (size_t i = 0; i < 5; i++) ubtrfs_close((ubtrfs_fs *)pools[FS][i], NULL);
  for (size_t i = 0; functions[i].name != NULL; i++) {
    printf("%9lu succeeded %9lu failed  %s\n", functions[i].nr_ok, functions[i].nr_failed, functions[i].name);
  }
  printf("%lu calls: %lu succeeded, %lu failed, %lu of them for a mistake of the program\n", calls, nr_ok, nr_failed, nr_usage);
  return 0;
}
