-- job_submit.lua: what a site can check before a job waits for hours. Beside slurm.conf, with JobSubmitPlugins=lua.
-- Slurm calls it for every component of a heterogeneous job alone; one that is refused refuses the job.

local with_gpus = { train = true, infer = true }
local without_gpus = { cpu = true, spare = true }

local function gpus(job)
   for _, asked in ipairs({ job.gres, job.tres_per_node, job.tres_per_task, job.tres_per_job, job.tres_per_socket }) do
      if asked ~= nil and string.find(asked, "gpu") then
         return true
      end
   end
   return false
end

local function ours(job)
   return job.name ~= nil and string.find(job.name, "^hpcrl") ~= nil
end

function slurm_job_submit(job, partitions, uid)
   local partition = job.partition or ""
   if without_gpus[partition] and gpus(job) then
      slurm.log_user("partition " .. partition .. " has no GPUs: take --gpus-per-node out of the sandbox component")
      return slurm.ERROR
   end
   if ours(job) and with_gpus[partition] and not gpus(job) then
      slurm.log_user("partition " .. partition .. " is for GPU jobs: give --gpus-per-node in this component")
      return slurm.ERROR
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
