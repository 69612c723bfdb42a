//! Layout of a file that is being born.
use weir_proto::map::{ClusterMap, Layout};
use weir_proto::{Error, Result};

/// The layout that the settings ask for: over all groups of the scheme, beginning at one that `seed` chooses.
/// Pools are taken in the order of their names.
pub fn layout_for_new_file(map: &ClusterMap, seed: u32) -> Result<Layout> {
    let scheme = map.settings.scheme;
    let mut pools: Vec<&str> = map.groups.iter().map(|g| g.pool.as_str()).collect();
    pools.sort_unstable();
    pools.dedup();
    let (first_pg, pg_count) =
        pools.iter().find_map(|pool| map.groups_of(pool, scheme)).ok_or_else(|| {
            Error::unavailable(format!(
                "no placement group of scheme {scheme} yet: it needs {} targets in one pool, {} have joined",
                scheme.width(),
                map.targets.len()
            ))
        })?;
    Ok(Layout { scheme, cell_shift: map.settings.cell_shift, first_pg, pg_count, seed })
}
