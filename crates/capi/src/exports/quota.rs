//! Quotas: numbers and limits of subvolumes and of groups of them
//!
//! The id of a quota group has the level in its upper 16 bits, and a number in its lower 48 bits. A group of level 0 belongs
//! to a subvolume, and its id is the id of the subvolume. The group 1/100 has the id `(UINT64_C(1) << 48) + 100`.

use std::ffi::c_int;

use ubtrfs::manage::{QgroupId, QgroupSummary, QuotaKind};

use crate::border::{Address, ErrorPlace, OwnedAddress, ResultPlace};
use crate::exports::filesystem::UbtrfsFs;
use crate::exports::job::{UbtrfsJob, job_of};
use crate::failure::{CallFailure, answer, engine_failure};
use crate::handles::Handle;
use crate::memory::give_list;

/// Quotas are off.
pub const UBTRFS_QUOTA_OFF: u32 = 0;
/// An extent counts for all subvolumes that use it.
pub const UBTRFS_QUOTA_FULL: u32 = 1;
/// An extent counts for the subvolume that allocated it. Extents that exist already are not counted.
pub const UBTRFS_QUOTA_SIMPLE: u32 = 2;

/// As a limit: none.
pub const UBTRFS_NO_LIMIT: u64 = 0xffff_ffff_ffff_ffff;

/// The state of quotas.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsQuotaState {
    /// `UBTRFS_QUOTA_OFF`, `UBTRFS_QUOTA_FULL` or `UBTRFS_QUOTA_SIMPLE`.
    pub kind: u32,
    /// 1 if the numbers are right, otherwise 0.
    pub is_consistent: u32,
    /// 1 while all extents are being counted, otherwise 0.
    pub is_counting: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// The address up to which extents were counted, while `is_counting`.
    pub counted_up_to: u64,
    /// Not used: 0.
    pub more: [u64; 2],
}

/// A quota group.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsQgroup {
    /// Its id.
    pub id: u64,
    /// Bytes of all extents that the group refers to.
    pub referenced: u64,
    /// Bytes of the extents that nothing else refers to.
    pub exclusive: u64,
    /// The limit of `referenced`, or `UBTRFS_NO_LIMIT`.
    pub max_referenced: u64,
    /// The limit of `exclusive`, or `UBTRFS_NO_LIMIT`.
    pub max_exclusive: u64,
    /// The ids of the groups that the group belongs to; or null.
    pub parents: Address<u64>,
    /// The number of `parents`.
    pub nr_parents: usize,
    /// The ids of the groups that belong to the group; or null.
    pub members: Address<u64>,
    /// The number of `members`.
    pub nr_members: usize,
    /// Not used: 0.
    pub more: [u64; 3],
}

/// Switches quotas on. `kind` is `UBTRFS_QUOTA_FULL` or `UBTRFS_QUOTA_SIMPLE`. Full quotas count all extents in the
/// background, for which `ubtrfs_quota_wait` waits.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_quota_enable(fs: Handle<UbtrfsFs>, kind: u32, error: ErrorPlace) -> c_int {
    answer(error, || {
        let kind = match kind {
            UBTRFS_QUOTA_FULL => QuotaKind::Full,
            UBTRFS_QUOTA_SIMPLE => QuotaKind::Simple,
            _ => {
                let problem = format!("kind is {kind}; give UBTRFS_QUOTA_FULL or UBTRFS_QUOTA_SIMPLE");
                return Err(CallFailure::argument(problem));
            }
        };
        Ok(fs.get()?.enable_quotas(kind)?)
    })
}

/// Switches quotas off. All groups and limits are lost.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_quota_disable(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.disable_quotas()?))
}

/// Describes the state of quotas.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_quota_status(
    fs: Handle<UbtrfsFs>,
    state: ResultPlace<UbtrfsQuotaState>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        state.needed("state")?;
        let found = fs.get()?.quota_status();
        let kind = match found {
            None => UBTRFS_QUOTA_OFF,
            Some(found) if found.simple => UBTRFS_QUOTA_SIMPLE,
            Some(_) => UBTRFS_QUOTA_FULL,
        };
        let counted = found.and_then(|found| found.rescan);
        state.set(UbtrfsQuotaState {
            kind,
            is_consistent: found.is_some_and(|found| found.consistent).into(),
            is_counting: counted.is_some().into(),
            reserved: 0,
            counted_up_to: counted.unwrap_or(0),
            more: [0; 2],
        });
        Ok(())
    })
}

/// Begins to count all extents again, in the background.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_quota_rescan(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || {
        let begun = fs.get()?.engine().start_quota_rescan();
        begun.map_err(|failure| engine_failure("count the extents", &failure))
    })
}

/// Waits until all extents are counted. Cancelling `job` ends only the wait. `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_quota_wait(fs: Handle<UbtrfsFs>, job: Handle<UbtrfsJob>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.wait_for_quotas(&*job_of(job)?)?))
}

/// Lists all quota groups by id, with the numbers of the last commit. Fails with ENOTCONN if quotas are off. Free the array
/// `qgroups` with `ubtrfs_free`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_qgroup_list(
    fs: Handle<UbtrfsFs>,
    qgroups: ResultPlace<OwnedAddress<UbtrfsQgroup>>,
    nr_qgroups: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        qgroups.set(OwnedAddress::NULL);
        nr_qgroups.set(0);
        qgroups.needed("the place for the quota groups")?;
        nr_qgroups.needed("nr_qgroups")?;
        let found = fs.get()?.qgroups()?;
        nr_qgroups.set(found.len());
        qgroups.set(shown(&found));
        Ok(())
    })
}

/// Makes a quota group of level 1 or higher. Groups of level 0 are made with their subvolumes.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_qgroup_create(fs: Handle<UbtrfsFs>, id: u64, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.create_qgroup(QgroupId(id))?))
}

/// Removes a quota group. Fails with EBUSY if it has members or belongs to a subvolume.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_qgroup_destroy(fs: Handle<UbtrfsFs>, id: u64, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.destroy_qgroup(QgroupId(id))?))
}

/// Makes a group a member of another one of a higher level. `needs_rescan`, which may be null, gets 1 if the numbers are
/// wrong until `ubtrfs_quota_rescan` has counted all extents, otherwise 0.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_qgroup_assign(
    fs: Handle<UbtrfsFs>,
    member: u64,
    parent: u64,
    needs_rescan: ResultPlace<c_int>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        needs_rescan.set(fs.get()?.assign_qgroup(QgroupId(member), QgroupId(parent))?.into());
        Ok(())
    })
}

/// Ends what `ubtrfs_qgroup_assign` began. `needs_rescan` is as there.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_qgroup_remove(
    fs: Handle<UbtrfsFs>,
    member: u64,
    parent: u64,
    needs_rescan: ResultPlace<c_int>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        needs_rescan.set(fs.get()?.remove_qgroup(QgroupId(member), QgroupId(parent))?.into());
        Ok(())
    })
}

/// Sets both limits of a group: bytes of all extents that it refers to, and bytes that only it refers to, or
/// `UBTRFS_NO_LIMIT`. Writes beyond a limit fail with EDQUOT.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_qgroup_limit(
    fs: Handle<UbtrfsFs>,
    id: u64,
    max_referenced: u64,
    max_exclusive: u64,
    error: ErrorPlace,
) -> c_int {
    let limit = |bytes| (bytes != UBTRFS_NO_LIMIT).then_some(bytes);
    answer(error, || Ok(fs.get()?.limit_qgroup(QgroupId(id), limit(max_referenced), limit(max_exclusive))?))
}

fn shown(found: &[QgroupSummary]) -> OwnedAddress<UbtrfsQgroup> {
    let mut owned = Vec::new();
    let mut ids = |list: &[QgroupId]| {
        let numbers: Vec<u64> = list.iter().map(|id| id.0).collect();
        let address = (Address::of_list(&numbers), numbers.len());
        owned.push(numbers);
        address
    };
    let one = |group: &QgroupSummary| {
        let ((parents, nr_parents), (members, nr_members)) = (ids(&group.parents), ids(&group.members));
        UbtrfsQgroup {
            id: group.id.0,
            referenced: group.referenced,
            exclusive: group.exclusive,
            max_referenced: group.max_referenced.unwrap_or(UBTRFS_NO_LIMIT),
            max_exclusive: group.max_exclusive.unwrap_or(UBTRFS_NO_LIMIT),
            parents,
            nr_parents,
            members,
            nr_members,
            more: [0; 3],
        }
    };
    let list = found.iter().map(one).collect();
    give_list(list, owned)
}
