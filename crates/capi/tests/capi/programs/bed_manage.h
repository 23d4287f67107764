/*
 * The part of bed.c that works on whole filesystems. Their devices may belong to other filesystems of the bed, too, which
 * then find foreign or missing content.
 */

static const char *profile(void) {
  static const char *const profiles[] = {"single", "dup", "raid1", "raid0", "raid10", "raid1c3"};
  return is_right() ? profiles[below(2)] : one_in(3) ? word() : profiles[below(6)];
}

/* The id of a device. */
static uint64_t devid(void) {
  return is_right() ? 1 : one_in(3) ? number() : below(4);
}

/* The id of a quota group. */
static uint64_t qgroup(void) {
  static const uint64_t ids[] = {5, 256, 257, UINT64_C(1) << 48, (UINT64_C(1) << 48) + 7, (UINT64_C(2) << 48) + 7};
  return one_in(4) && !is_right() ? number() : ids[below(6)];
}

static ubtrfs_balance_filter *filter(ubtrfs_balance_filter *filter) {
  static const char *profiles[2];
  ubtrfs_balance_filter made = UBTRFS_BALANCE_FILTER_INIT;
  if (one_in(2)) return NULL;
  profiles[0] = profile();
  profiles[1] = profile();
  if (one_in(30)) made.struct_size = (size_t)below(8);
  if (one_in(8)) made.flags = flags();
  if (one_in(4)) made.limit = (uint32_t)number();
  if (one_in(4)) made.usage_min = (uint32_t)below(120);
  if (one_in(4)) made.usage_max = one_in(4) ? (uint32_t)number() : 100;
  if (one_in(8)) made.devid = devid();
  if (one_in(8)) made.range_start = number();
  if (one_in(8)) made.range_end = number();
  if (one_in(4)) made.profiles = profiles;
  if (one_in(6)) made.nr_profiles = made.profiles != NULL ? below(3) : one_in(2) ? SIZE_MAX : 1;
  if (one_in(3)) made.convert = profile();
  *filter = made;
  return filter;
}

static void call_balance(void) {
  ubtrfs_balance_filter data, metadata, system;
  ubtrfs_balance_options options = UBTRFS_BALANCE_OPTIONS_INIT;
  ubtrfs_balance_report *report = NULL;
  ubtrfs_balance_state status;
  size_t i, j;
  options.flags = one_in(8) ? flags() : (uint32_t)below(2);
  options.data = filter(&data);
  options.metadata = filter(&metadata);
  options.system = filter(&system);
  switch (below(8)) {
  case 0: CALL(ubtrfs_balance_pause, AN_FS); break;
  case 1: CALL(ubtrfs_balance_cancel, AN_FS); break;
  case 2: CALL(ubtrfs_balance_resume, AN_FS, one_in(2) ? NULL : A_JOB, one_in(3) ? NULL : &report); break;
  case 3:
  case 4: CALL(ubtrfs_balance_status, AN_FS, one_in(9) ? NULL : &status); break;
  default:
    CALL(ubtrfs_balance, AN_FS, one_in(3) ? NULL : &options, is_mild || one_in(2) ? NULL : A_JOB,
         one_in(3) ? NULL : &report);
    break;
  }
  for (i = 0; report != NULL && i < report->nr_failures; i++) {
    if (report->failures[i].reason[0] == 0) wrong("a failure has no reason");
    for (j = 0; j < report->failures[i].nr_users; j++) {
      const char *path = report->failures[i].users[j].path;
      if (path != NULL && strlen(path) == SIZE_MAX) wrong("a user has no path");
    }
  }
  keep_memory(report);
}

static void read_files(const ubtrfs_damaged_file *files, size_t nr) {
  size_t i;
  for (i = 0; i < nr; i++) {
    if (files[i].path != NULL && files[i].path[0] == 0) wrong("a damaged file has an empty path");
  }
}

static void call_scrub(void) {
  ubtrfs_scrub_options options = UBTRFS_SCRUB_OPTIONS_INIT;
  ubtrfs_scrub_report *report = NULL;
  uint64_t devids[2];
  size_t i;
  devids[0] = devid();
  devids[1] = devid();
  options.flags = one_in(8) ? flags() : (uint32_t)below(2);
  if (one_in(2)) options.devids = devids;
  options.nr_devids = options.devids != NULL ? (uint32_t)below(3) : one_in(8) ? UINT32_MAX : 0;
  if (one_in(4)) options.bytes_per_sec = UINT64_MAX - below(100);
  if (one_in(6)) {
    CALL(ubtrfs_scrub_cancel, AN_FS);
    return;
  }
  CALL(ubtrfs_scrub, AN_FS, one_in(3) ? NULL : &options, is_mild || one_in(2) ? NULL : A_JOB, one_in(9) ? NULL : &report);
  for (i = 0; report != NULL && i < report->nr_devices; i++) {
    const ubtrfs_scrubbed_device *device = &report->devices[i];
    if ((device->status == 0) != (device->message == NULL)) wrong("a device has a message without a failure");
  }
  if (report != NULL) read_files(report->files, report->nr_files);
  keep_memory(report);
}

static void call_members(void) {
  ubtrfs_replace_report *report = NULL;
  ubtrfs_space_report *space = NULL;
  uint64_t devids[2], id, size;
  size_t i;
  devids[0] = devid();
  devids[1] = devid();
  switch (below(10)) {
  case 0:
  case 1: CALL(ubtrfs_add_device, AN_FS, A_DEVICE, one_in(3) ? A_JOB : NULL, one_in(3) ? NULL : &id); break;
  case 2:
    CALL(ubtrfs_remove_devices, AN_FS, one_in(9) ? NULL : devids, one_in(9) ? SIZE_MAX : below(3),
         one_in(3) ? A_JOB : NULL);
    break;
  case 3:
    CALL(ubtrfs_replace_device, AN_FS, devid(), A_DEVICE, one_in(3) ? A_JOB : NULL, one_in(3) ? NULL : &report);
    if (report != NULL) read_files(report->files, report->nr_files);
    keep_memory(report);
    break;
  case 4:
    size = is_right() ? (uint64_t)(128 + below(128)) << 20 : number();
    CALL(ubtrfs_resize_device, AN_FS, devid(), size, one_in(3) ? A_JOB : NULL);
    break;
  case 5: CALL(ubtrfs_min_device_size, AN_FS, devid(), one_in(9) ? NULL : &size); break;
  default:
    CALL(ubtrfs_space, AN_FS, one_in(9) ? NULL : &space);
    for (i = 0; space != NULL && i < space->nr_groups; i++) {
      if (space->groups[i].kind[0] == 0 || space->groups[i].profile[0] == 0) wrong("a group has no name");
    }
    for (i = 0; space != NULL && i < space->nr_devices; i++) {
      const ubtrfs_device_usage *device = &space->devices[i];
      if (device->nr_shares > 0 && device->shares[device->nr_shares - 1].kind[0] == 0) wrong("a share has no name");
    }
    keep_memory(space);
    break;
  }
}

static void call_quota(void) {
  ubtrfs_quota_state status;
  ubtrfs_qgroup *list = NULL;
  size_t nr = 0, i;
  int needs_rescan;
  switch (below(14)) {
  case 0: CALL(ubtrfs_quota_enable, AN_FS, one_in(4) ? flags() : 1 + (uint32_t)below(2)); break;
  case 1: if (one_in(4)) CALL(ubtrfs_quota_disable, AN_FS); break;
  case 2: CALL(ubtrfs_quota_status, AN_FS, one_in(9) ? NULL : &status); break;
  case 3: CALL(ubtrfs_quota_rescan, AN_FS); break;
  case 4: CALL(ubtrfs_quota_wait, AN_FS, one_in(3) ? A_JOB : NULL); break;
  case 5:
  case 6: CALL(ubtrfs_qgroup_create, AN_FS, qgroup()); break;
  case 7: CALL(ubtrfs_qgroup_destroy, AN_FS, qgroup()); break;
  case 8: CALL(ubtrfs_qgroup_assign, AN_FS, qgroup(), qgroup(), one_in(3) ? NULL : &needs_rescan); break;
  case 9: CALL(ubtrfs_qgroup_remove, AN_FS, qgroup(), qgroup(), one_in(3) ? NULL : &needs_rescan); break;
  case 10:
    CALL(ubtrfs_qgroup_limit, AN_FS, qgroup(), one_in(2) ? UBTRFS_NO_LIMIT : number(), one_in(2) ? UBTRFS_NO_LIMIT : number());
    break;
  default:
    CALL(ubtrfs_qgroup_list, AN_FS, one_in(9) ? NULL : &list, one_in(9) ? NULL : &nr);
    for (i = 0; list != NULL && i < nr; i++) {
      if (list[i].nr_members > 0 && list[i].members[list[i].nr_members - 1] == list[i].id) wrong("a group has itself");
      if (list[i].nr_parents > 0 && list[i].parents[list[i].nr_parents - 1] == list[i].id) wrong("a group is its own");
    }
    keep_memory(list);
    break;
  }
}

/* An offset in a file, mostly at a sector. */
static uint64_t at_sector(void) {
  return is_right() ? (uint64_t)below(8) << 12 : number();
}

static void call_extents(void) {
  ubtrfs_defragment_options options = UBTRFS_DEFRAGMENT_OPTIONS_INIT;
  uint64_t result;
  int equal;
  options.flags = one_in(8) ? flags() : (uint32_t)below(2);
  if (one_in(3)) options.start = number();
  if (one_in(3)) options.end = number();
  if (one_in(3)) options.small_bytes = number();
  if (one_in(3)) options.compress = one_in(3) ? word() : one_in(2) ? "zstd" : "lzo";
  switch (below(8)) {
  case 0: {
    /* Holes are walked by the megabyte, and files of the bed can have exabytes of them. */
    ubtrfs_fs *known = AN_FS;
    const char *name = path();
    ubtrfs_metadata st;
    if (ubtrfs_stat(known, name, &st, NULL) == 0 && st.size >> 40 != 0) break;
    CALL(ubtrfs_defragment, known, name, one_in(3) ? NULL : &options, one_in(3) ? A_JOB : NULL, one_in(3) ? NULL : &result);
    break;
  }
  case 1:
  case 2: CALL(ubtrfs_file_clone_range, A_FILE, at_sector(), A_FILE, at_sector(), at_sector()); break;
  case 3:
  case 4: {
    ubtrfs_file *source = A_FILE;
    ubtrfs_metadata st;
    if (ubtrfs_file_stat(source, &st, NULL) == 0 && st.size >> 40 != 0) break;
    CALL(ubtrfs_file_dedupe_range, A_FILE, at_sector(), source, at_sector(), at_sector(), one_in(3) ? A_JOB : NULL,
         one_in(9) ? NULL : &equal);
    break;
  }
  case 5: {
    /* Filesystems in memory can have exabytes, and devices are told about them by the gigabyte. */
    ubtrfs_fs *known = AN_FS;
    ubtrfs_space_usage usage;
    if (ubtrfs_usage(known, &usage, NULL) == 0 && usage.total_bytes >> 40 != 0) break;
    CALL(ubtrfs_trim, known, number(), one_in(3) ? A_JOB : NULL, one_in(3) ? NULL : &result);
    break;
  }
  case 6: CALL(ubtrfs_set_label, AN_FS, word()); break;
  default: CALL(ubtrfs_subvolume_default, AN_FS, one_in(9) ? NULL : &result); break;
  }
}

static void call_manage(void) {
  switch (below(12)) {
  case 0: call_balance(); break;
  case 1: call_scrub(); break;
  case 2:
  case 3: call_members(); break;
  case 4:
  case 5:
  case 6: call_quota(); break;
  default: call_extents(); break;
  }
}
