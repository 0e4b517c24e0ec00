/* A libnvidia-ml.so.1 for nodes without a GPU. Every answer is a line of a state file:

       gpu*.temperature.gpu = 36
       gpu1.nvlink.3.state = 0
       gpu0.power.usage = !999     a number behind ! is the error that the call returns
       gpu0.* = @hang              the call never returns

   What stands left of = is a pattern; the last line that matches wins, so a fault is a line at the end. A key that
   no line matches is what the GPU does not support. The file is read again whenever it has changed: LAB_NVML_STATE,
   else /var/lib/lab-gpu/state. The calls, types and numbers are those of NVIDIA's NVML reference. */
#define _GNU_SOURCE
#include <errno.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
	OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999,
};
#define GPUS 64
#define MIGS 8
#define LINKS 18
#define KEY 96
#define WIDTH 128
typedef int Return;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { char name[24]; int gpu, mig; } *Device; /* mig: -1 for a whole GPU */

/* ---- the state file */

static struct line { char key[KEY], value[WIDTH]; } *lines;
static size_t count;
static struct stat seen;
static int initialized;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static char *trim(char *text)
{
	text += strspn(text, " \t");
	text[strcspn(text, "#\n")] = 0;
	for (char *end = text + strlen(text); end > text && strchr(" \t", end[-1]); *--end = 0)
		;
	return text;
}

/* Read the file if it is another one than before; false where there is none. */
static int load(void)
{
	const char *path = getenv("LAB_NVML_STATE");
	struct stat now;
	FILE *file = fopen(path ? path : "/var/lib/lab-gpu/state", "re");
	char text[KEY + WIDTH + 64];

	if (!file)
		return 0;
	if (fstat(fileno(file), &now) == 0 && (now.st_ino != seen.st_ino || now.st_size != seen.st_size ||
	    now.st_mtim.tv_sec != seen.st_mtim.tv_sec || now.st_mtim.tv_nsec != seen.st_mtim.tv_nsec)) {
		count = 0;
		while (fgets(text, sizeof text, file)) {
			char *value = strchr(text, '=');
			if (text[0] == '#' || !value)
				continue;
			*value++ = 0;
			if (count % 64 == 0 && !(lines = reallocarray(lines, count + 64, sizeof *lines)))
				abort();
			snprintf(lines[count].key, KEY, "%s", trim(text));
			snprintf(lines[count++].value, WIDTH, "%s", trim(value));
		}
		seen = now;
	}
	fclose(file);
	return 1;
}

/* The value of a key as text; OK, or the error that stands for it. */
static Return look(const char *key, char value[WIDTH])
{
	Return result = NOT_SUPPORTED;

	pthread_mutex_lock(&lock);
	if (!initialized)
		result = UNINITIALIZED;
	else if (!load())
		result = DRIVER_NOT_LOADED;
	else
		for (size_t i = count; i-- > 0;)
			if (fnmatch(lines[i].key, key, 0) == 0) {
				snprintf(value, WIDTH, "%s", lines[i].value);
				result = value[0] == '!' ? atoi(value + 1) : OK;
				break;
			}
	pthread_mutex_unlock(&lock);
	while (result == OK && strcmp(value, "@hang") == 0)
		pause();
	return result;
}

static void join(char key[KEY], Device device, const char *format, va_list arguments)
{
	int used = device ? snprintf(key, KEY, "%s.", device->name) : 0;

	vsnprintf(key + used, KEY - used, format, arguments);
}

/* A number of the device, or of the whole system where there is none. */
static Return number(Device device, long long *out, const char *format, ...)
{
	char key[KEY], value[WIDTH];
	va_list arguments;
	Return result;

	va_start(arguments, format);
	join(key, device, format, arguments);
	va_end(arguments);
	result = look(key, value);
	if (result == OK)
		*out = strtoll(value, NULL, 0);
	return result;
}

static Return text(Device device, char *out, u32 size, const char *format, ...)
{
	char key[KEY], value[WIDTH];
	va_list arguments;
	Return result;

	if (!out)
		return INVALID_ARGUMENT;
	va_start(arguments, format);
	join(key, device, format, arguments);
	va_end(arguments);
	result = look(key, value);
	if (result == OK && strlen(value) >= size)
		return INSUFFICIENT_SIZE;
	if (result == OK)
		strcpy(out, value);
	return result;
}

/* Several numbers at once: each goes to its place in `out`; the first error ends it. */
struct place { const char *key; size_t offset, size; };

static Return fill(Device device, void *out, const struct place *places, size_t n, const char *prefix)
{
	for (size_t i = 0; i < n; i++) {
		long long value;
		Return result = number(device, &value, "%s%s", prefix, places[i].key);
		if (result != OK)
			return result;
		memcpy((char *)out + places[i].offset, &value, places[i].size); /* little endian */
	}
	return OK;
}
#define PLACE(type, member, key) { key, offsetof(type, member), sizeof(((type *)0)->member) }
#define FILL(device, out, places, prefix) \
	((device) && (out) ? fill(device, out, places, sizeof places / sizeof *places, prefix) : INVALID_ARGUMENT)

#define ASSIGN(type, out, device, ...) do { \
	long long value_; \
	if (!(out)) return INVALID_ARGUMENT; \
	Return result_ = number(device, &value_, __VA_ARGS__); \
	if (result_ != OK) return result_; \
	*(out) = (type)value_; \
} while (0)

/* ---- devices: which GPUs are there is asked each time, so that one can go and come back */

static void *handles[GPUS][MIGS + 1];

static Device handle(int gpu, int mig)
{
	Device device;

	pthread_mutex_lock(&lock);
	if (!handles[gpu][mig + 1]) {
		device = calloc(1, sizeof *device);
		if (!device)
			abort();
		device->gpu = gpu;
		device->mig = mig;
		if (mig < 0)
			snprintf(device->name, sizeof device->name, "gpu%d", gpu);
		else
			snprintf(device->name, sizeof device->name, "gpu%d.mig.%d", gpu, mig);
		handles[gpu][mig + 1] = device;
	}
	device = handles[gpu][mig + 1];
	pthread_mutex_unlock(&lock);
	return device;
}

static int there(int gpu)
{
	long long value;

	return number(handle(gpu, -1), &value, "present") == OK && value;
}

/* The GPU behind index `index` among those that are there: their number where there are not so many. */
static int nth(u32 index, int *gpu)
{
	int found = 0;

	for (int i = 0; i < GPUS; i++)
		if (there(i) && (u32)found++ == index) {
			*gpu = i;
			return -1;
		}
	return found;
}

/* A handle is given out unless an error stands for it ("gpu0.*" matches "gpu0.handle"). */
static Return give(int gpu, Device *out)
{
	long long value;
	Return result = number(handle(gpu, -1), &value, "handle");

	if (result != OK && result != NOT_SUPPORTED)
		return result;
	*out = handle(gpu, -1);
	return OK;
}

static Return find(const char *key, const char *wanted, Device *out)
{
	char value[WIDTH];

	if (!wanted || !out)
		return INVALID_ARGUMENT;
	for (int i = 0; i < GPUS; i++)
		if (there(i) && text(handle(i, -1), value, sizeof value, key) == OK && !strcasecmp(value, wanted))
			return give(i, out);
	return initialized ? NOT_FOUND : UNINITIALIZED;
}

/* ---- the library and the system */

Return nvmlInitWithFlags(u32 flags)
{
	char value[WIDTH];
	Return result;

	(void)flags;
	pthread_mutex_lock(&lock);
	initialized++;
	pthread_mutex_unlock(&lock);
	result = look("init", value);
	if (result == OK || result == NOT_SUPPORTED)
		return OK;
	pthread_mutex_lock(&lock);
	initialized--;
	pthread_mutex_unlock(&lock);
	return result;
}
Return nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
Return nvmlInit(void) { return nvmlInitWithFlags(0); }
Return nvmlShutdown(void)
{
	Return result;

	pthread_mutex_lock(&lock);
	result = initialized ? OK : UNINITIALIZED;
	initialized -= initialized > 0;
	pthread_mutex_unlock(&lock);
	return result;
}

const char *nvmlErrorString(Return result)
{
	static const struct { Return result; const char *words; } names[] = {
		{ 0, "Success" }, { 1, "Uninitialized" }, { 2, "Invalid Argument" }, { 3, "Not Supported" },
		{ 4, "Insufficient Permissions" }, { 5, "Already Initialized" }, { 6, "Not Found" },
		{ 7, "Insufficient Size" }, { 8, "Insufficient External Power" }, { 9, "Driver Not Loaded" },
		{ 10, "Timeout" }, { 11, "Interrupt Request Issue" }, { 12, "NVML Shared Library Not Found" },
		{ 13, "Function Not Found" }, { 14, "Corrupted infoROM" }, { 15, "GPU is lost" },
		{ 16, "GPU requires reset" }, { 17, "GPU access blocked by the operating system" },
		{ 18, "Driver/library version mismatch" }, { 19, "In use by another client" },
		{ 20, "Insufficient Memory" }, { 21, "No data" }, { 25, "Argument version mismatch" },
	};

	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i].result == result)
			return names[i].words;
	return "Unknown Error";
}

Return nvmlSystemGetDriverVersion(char *out, u32 size) { return text(NULL, out, size, "driver"); }
Return nvmlSystemGetNVMLVersion(char *out, u32 size) { return text(NULL, out, size, "nvml"); }
Return nvmlSystemGetCudaDriverVersion_v2(int *out) { ASSIGN(int, out, NULL, "cuda"); return OK; }
Return nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }
Return nvmlSystemGetProcessName(u32 pid, char *out, u32 size) { return text(NULL, out, size, "process.%u", pid); }

Return nvmlDeviceGetCount_v2(u32 *out)
{
	int gpu;
	char value[WIDTH];
	Return result = look("count", value);

	if (!out)
		return INVALID_ARGUMENT;
	if (result != OK && result != NOT_SUPPORTED)
		return result;
	*out = (u32)nth(GPUS, &gpu);
	return OK;
}
Return nvmlDeviceGetCount(u32 *out) { return nvmlDeviceGetCount_v2(out); }

Return nvmlDeviceGetHandleByIndex_v2(u32 index, Device *out)
{
	int gpu;

	if (!initialized)
		return UNINITIALIZED;
	if (!out || nth(index, &gpu) >= 0)
		return INVALID_ARGUMENT;
	return give(gpu, out);
}
Return nvmlDeviceGetHandleByIndex(u32 index, Device *out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }
Return nvmlDeviceGetHandleByUUID(const char *wanted, Device *out) { return find("uuid", wanted, out); }
Return nvmlDeviceGetHandleBySerial(const char *wanted, Device *out) { return find("serial", wanted, out); }
Return nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, Device *out)
{
	char padded[40];

	if (wanted && strcspn(wanted, ":") == 4) { /* both widths of the domain are in use */
		snprintf(padded, sizeof padded, "0000%s", wanted);
		wanted = padded;
	}
	return find("pci.bus_id", wanted, out);
}
Return nvmlDeviceGetIndex(Device device, u32 *out)
{
	int index = 0;

	if (!device || !out)
		return INVALID_ARGUMENT;
	for (int i = 0; i < device->gpu; i++)
		index += there(i);
	*out = (u32)index;
	return OK;
}

/* ---- one value of a device: the call, its type, the key */

#define TEXT(call, key) \
	Return call(Device device, char *out, u32 size) \
	{ return device ? text(device, out, size, key) : INVALID_ARGUMENT; }
#define VALUE(call, type, key) \
	Return call(Device device, type *out) \
	{ if (!device) return INVALID_ARGUMENT; ASSIGN(type, out, device, key); return OK; }
/* of one link, sensor, clock ...: its number is part of the key */
#define VALUE_OF(call, type, key) \
	Return call(Device device, u32 which, type *out) \
	{ if (!device) return INVALID_ARGUMENT; ASSIGN(type, out, device, key, which); return OK; }
#define LINK_VALUE(call, type, key) \
	Return call(Device device, u32 link, type *out) \
	{ if (!device || link >= LINKS) return INVALID_ARGUMENT; ASSIGN(type, out, device, key, link); return OK; }
#define VALUE_OF_TWO(call, type, key) \
	Return call(Device device, u32 which, u32 what, type *out) \
	{ if (!device) return INVALID_ARGUMENT; ASSIGN(type, out, device, key, which, what); return OK; }
#define LINK_VALUE_OF(call, type, key) \
	Return call(Device device, u32 link, u32 what, type *out) \
	{ if (!device || link >= LINKS) return INVALID_ARGUMENT; ASSIGN(type, out, device, key, link, what); return OK; }
#define PAIR(call, type, first, second) \
	Return call(Device device, type *one, type *two) \
	{ if (!device) return INVALID_ARGUMENT; ASSIGN(type, one, device, first); ASSIGN(type, two, device, second); return OK; }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetBoardPartNumber, "board_part")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom.image")
VALUE(nvmlDeviceGetMinorNumber, u32, "minor")
VALUE(nvmlDeviceGetBrand, u32, "brand")
VALUE(nvmlDeviceGetArchitecture, u32, "architecture")
VALUE(nvmlDeviceGetNumGpuCores, u32, "cores")
VALUE(nvmlDeviceGetMemoryBusWidth, u32, "memory.bus_width")
VALUE(nvmlDeviceGetBoardId, u32, "board_id")
VALUE(nvmlDeviceGetPersistenceMode, u32, "persistence")
VALUE(nvmlDeviceGetComputeMode, u32, "compute_mode")
VALUE(nvmlDeviceGetDisplayActive, u32, "display")
VALUE(nvmlDeviceGetPerformanceState, u32, "pstate")
VALUE(nvmlDeviceGetPowerState, u32, "pstate")
VALUE(nvmlDeviceGetPowerUsage, u32, "power.usage")
VALUE(nvmlDeviceGetPowerManagementLimit, u32, "power.limit")
VALUE(nvmlDeviceGetEnforcedPowerLimit, u32, "power.limit")
VALUE(nvmlDeviceGetPowerManagementDefaultLimit, u32, "power.default")
VALUE(nvmlDeviceGetTotalEnergyConsumption, u64, "power.energy")
VALUE(nvmlDeviceGetFanSpeed, u32, "fan")
VALUE(nvmlDeviceGetCurrPcieLinkGeneration, u32, "pcie.generation")
VALUE(nvmlDeviceGetMaxPcieLinkGeneration, u32, "pcie.generation_max")
VALUE(nvmlDeviceGetGpuMaxPcieLinkGeneration, u32, "pcie.generation_max")
VALUE(nvmlDeviceGetCurrPcieLinkWidth, u32, "pcie.width")
VALUE(nvmlDeviceGetMaxPcieLinkWidth, u32, "pcie.width_max")
VALUE(nvmlDeviceGetPcieReplayCounter, u32, "pcie.replays")
VALUE(nvmlDeviceGetRetiredPagesPendingStatus, u32, "retired.pending")
VALUE(nvmlDeviceGetMaxMigDeviceCount, u32, "mig.max")
VALUE(nvmlDeviceGetCurrentClocksEventReasons, u64, "clocks.reasons")
VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "clocks.reasons")
VALUE(nvmlDeviceGetSupportedClocksEventReasons, u64, "clocks.reasons_supported")
VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, u64, "clocks.reasons_supported")
VALUE(nvmlDeviceGetNumaNodeId, u32, "memory.numa_id")
VALUE_OF(nvmlDeviceGetTemperature, u32, "temperature.%u")
VALUE_OF(nvmlDeviceGetTemperatureThreshold, u32, "temperature.threshold.%u")
VALUE_OF(nvmlDeviceGetClockInfo, u32, "clocks.%u")
VALUE_OF(nvmlDeviceGetMaxClockInfo, u32, "clocks.max.%u")
VALUE_OF(nvmlDeviceGetApplicationsClock, u32, "clocks.applications.%u")
VALUE_OF(nvmlDeviceGetDefaultApplicationsClock, u32, "clocks.applications.%u")
VALUE_OF(nvmlDeviceGetPcieThroughput, u32, "pcie.throughput.%u")
LINK_VALUE(nvmlDeviceGetNvLinkState, u32, "nvlink.%u.state")
LINK_VALUE(nvmlDeviceGetNvLinkVersion, u32, "nvlink.%u.version")
LINK_VALUE(nvmlDeviceGetNvLinkRemoteDeviceType, u32, "nvlink.%u.remote_type")
LINK_VALUE_OF(nvmlDeviceGetNvLinkCapability, u32, "nvlink.%u.capability.%u")
LINK_VALUE_OF(nvmlDeviceGetNvLinkErrorCounter, u64, "nvlink.%u.errors.%u")
VALUE_OF_TWO(nvmlDeviceGetTotalEccErrors, u64, "ecc.%u.%u.total")
PAIR(nvmlDeviceGetEccMode, u32, "ecc.mode", "ecc.mode_pending")
PAIR(nvmlDeviceGetMigMode, u32, "mig.mode", "mig.mode_pending")
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, u32, "power.min", "power.max")
PAIR(nvmlDeviceGetCudaComputeCapability, int, "capability.major", "capability.minor")

Return nvmlDeviceValidateInforom(Device device)
{
	long long valid;

	return device ? number(device, &valid, "inforom.valid") : INVALID_ARGUMENT;
}
Return nvmlDeviceGetInforomVersion(Device device, u32 object, char *out, u32 size)
{
	return device ? text(device, out, size, "inforom.%u", object) : INVALID_ARGUMENT;
}
Return nvmlDeviceGetGspFirmwareVersion(Device device, char *out)
{
	return device ? text(device, out, 64, "gsp") : INVALID_ARGUMENT;
}
Return nvmlDeviceGetMemoryErrorCounter(Device device, u32 error, u32 counter, u32 location, u64 *out)
{
	if (!device)
		return INVALID_ARGUMENT;
	ASSIGN(u64, out, device, "ecc.%u.%u.%u", error, counter, location);
	return OK;
}

/* ---- structures */

typedef struct {
	char legacy[16];
	u32 domain, bus, device, id, subsystem;
	char bus_id[32];
} Pci;

static Return pci(Device device, Pci *out, const char *prefix)
{
	Return result;

	if (!device || !out)
		return INVALID_ARGUMENT;
	memset(out, 0, sizeof *out);
	result = text(device, out->bus_id, sizeof out->bus_id, "%sbus_id", prefix);
	if (result != OK)
		return result;
	sscanf(out->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
	snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
		 out->device & 0x1f);
	ASSIGN(u32, &out->id, device, "%sid", prefix);
	ASSIGN(u32, &out->subsystem, device, "%ssubsystem", prefix);
	return OK;
}
Return nvmlDeviceGetPciInfo_v3(Device device, Pci *out) { return pci(device, out, "pci."); }
Return nvmlDeviceGetPciInfo_v2(Device device, Pci *out) { return pci(device, out, "pci."); }
Return nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, u32 link, Pci *out)
{
	char prefix[32];

	if (link >= LINKS)
		return INVALID_ARGUMENT;
	snprintf(prefix, sizeof prefix, "nvlink.%u.remote.", link);
	return pci(device, out, prefix);
}

typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;

Return nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *out)
{
	static const struct place places[] = {
		PLACE(Memory2, total, "total"), PLACE(Memory2, reserved, "reserved"), PLACE(Memory2, used, "used"),
	};
	Return result;

	if (out && (out->version & 0xffffff) != sizeof *out)
		return ARGUMENT_VERSION_MISMATCH;
	result = FILL(device, out, places, "memory.");
	if (result == OK)
		out->free = out->total - out->reserved - out->used;
	return result;
}
/* The first version counts what the driver keeps for itself as used. */
Return nvmlDeviceGetMemoryInfo(Device device, Memory *out)
{
	Memory2 all = { .version = sizeof all | 2 << 24 };
	Return result = out ? nvmlDeviceGetMemoryInfo_v2(device, &all) : INVALID_ARGUMENT;

	if (result == OK)
		*out = (Memory){ all.total, all.free, all.reserved + all.used };
	return result;
}
Return nvmlDeviceGetBAR1MemoryInfo(Device device, Memory *out)
{
	static const struct place places[] = { PLACE(Memory, total, "total"), PLACE(Memory, used, "used") };
	Return result = FILL(device, out, places, "bar1.");

	if (result == OK)
		out->free = out->total - out->used;
	return result;
}

typedef struct { u32 gpu, memory; } Utilization;
Return nvmlDeviceGetUtilizationRates(Device device, Utilization *out)
{
	static const struct place places[] = {
		PLACE(Utilization, gpu, "gpu"), PLACE(Utilization, memory, "memory"),
	};
	return FILL(device, out, places, "utilization.");
}

typedef struct { u32 max, high, partial, low, none; } Histogram;
Return nvmlDeviceGetRowRemapperHistogram(Device device, Histogram *out)
{
	static const struct place places[] = {
		PLACE(Histogram, max, "max"), PLACE(Histogram, high, "high"), PLACE(Histogram, partial, "partial"),
		PLACE(Histogram, low, "low"), PLACE(Histogram, none, "none"),
	};
	return FILL(device, out, places, "remap.banks.");
}
Return nvmlDeviceGetRemappedRows(Device device, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failure)
{
	if (!device)
		return INVALID_ARGUMENT;
	ASSIGN(u32, corrected, device, "remap.corrected");
	ASSIGN(u32, uncorrected, device, "remap.uncorrected");
	ASSIGN(u32, pending, device, "remap.pending");
	ASSIGN(u32, failure, device, "remap.failure");
	return OK;
}

typedef struct {
	u32 version;
	u64 aggregate_parity, aggregate_secded, aggregate_corrected;
	u64 volatile_parity, volatile_secded, volatile_corrected;
	u64 l2, sm, pcie, mcu, other;
	u32 threshold;
} Sram;
Return nvmlDeviceGetSramEccErrorStatus(Device device, Sram *out)
{
	static const struct place places[] = {
		PLACE(Sram, aggregate_parity, "aggregate.parity"), PLACE(Sram, aggregate_secded, "aggregate.secded"),
		PLACE(Sram, aggregate_corrected, "aggregate.corrected"), PLACE(Sram, volatile_parity, "volatile.parity"),
		PLACE(Sram, volatile_secded, "volatile.secded"), PLACE(Sram, volatile_corrected, "volatile.corrected"),
		PLACE(Sram, l2, "source.l2"), PLACE(Sram, sm, "source.sm"), PLACE(Sram, pcie, "source.pcie"),
		PLACE(Sram, mcu, "source.mcu"), PLACE(Sram, other, "source.other"), PLACE(Sram, threshold, "threshold"),
	};
	return FILL(device, out, places, "sram.");
}

typedef struct { u32 version, channel, tpc; } Repair;
Return nvmlDeviceGetRepairStatus(Device device, Repair *out)
{
	static const struct place places[] = { PLACE(Repair, channel, "channel"), PLACE(Repair, tpc, "tpc") };
	return FILL(device, out, places, "repair.");
}

typedef struct { u64 l1, l2, memory, registers; } Detailed;
Return nvmlDeviceGetDetailedEccErrors(Device device, u32 error, u32 counter, Detailed *out)
{
	static const struct place places[] = { PLACE(Detailed, memory, "2") };
	char prefix[32];

	if (out)
		memset(out, 0, sizeof *out);

	snprintf(prefix, sizeof prefix, "ecc.%u.%u.", error, counter);
	return FILL(device, out, places, prefix);
}

typedef struct { u64 reference, violation; } Violation;
Return nvmlDeviceGetViolationStatus(Device device, u32 policy, Violation *out)
{
	static const struct place places[] = { PLACE(Violation, violation, "time") };
	struct timespec now;
	char prefix[32];

	snprintf(prefix, sizeof prefix, "violation.%u.", policy);
	clock_gettime(CLOCK_REALTIME, &now);
	if (out)
		out->reference = (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
	return FILL(device, out, places, prefix);
}

typedef struct { u32 version, sensor; int temperature; } TemperatureV;
Return nvmlDeviceGetTemperatureV(Device device, TemperatureV *out)
{
	if (!device)
		return INVALID_ARGUMENT;
	ASSIGN(int, out ? &out->temperature : NULL, device, "temperature.%u", out->sensor);
	return OK;
}
typedef struct { u32 version; int margin; } Margin;
Return nvmlDeviceGetMarginTemperature(Device device, Margin *out)
{
	if (!device)
		return INVALID_ARGUMENT;
	ASSIGN(int, out ? &out->margin : NULL, device, "temperature.margin");
	return OK;
}

typedef struct { unsigned char cluster[16]; Return status; u32 clique; unsigned char state; } Fabric;
typedef struct { u32 version; Fabric fabric; u32 health; } Fabric2;
typedef struct { u32 version; Fabric fabric; u32 health; unsigned char summary; } Fabric3;
static const struct place fabric_places[] = {
	PLACE(Fabric, status, "status"), PLACE(Fabric, clique, "clique"), PLACE(Fabric, state, "state"),
};
Return nvmlDeviceGetGpuFabricInfo(Device device, Fabric *out) { return FILL(device, out, fabric_places, "fabric."); }
Return nvmlDeviceGetGpuFabricInfoV(Device device, Fabric3 *out)
{
	Return result;

	if (!device || !out)
		return INVALID_ARGUMENT;
	if (out->version != (sizeof(Fabric2) | 2 << 24) && out->version != (sizeof(Fabric3) | 3 << 24))
		return ARGUMENT_VERSION_MISMATCH;
	result = FILL(device, &out->fabric, fabric_places, "fabric.");
	if (result != OK)
		return result;
	ASSIGN(u32, &out->health, device, "fabric.health");
	if (out->version >> 24 == 3)
		ASSIGN(unsigned char, &out->summary, device, "fabric.summary");
	return OK;
}

/* ---- lists */

/* The numbers at PREFIX0, PREFIX1 ... until one is missing. */
#define LIST(device, type, out, room, prefix) do { \
	u32 n_ = 0; \
	long long value_; \
	Return result_; \
	if (!(device) || !(room)) return INVALID_ARGUMENT; \
	while ((result_ = number(device, &value_, "%s%u", prefix, n_)) == OK) { \
		if ((out) && n_ < *(room)) (out)[n_] = (type)value_; \
		n_++; \
	} \
	if (result_ != NOT_SUPPORTED || n_ == 0) return result_; \
	result_ = n_ > *(room) || !(out) ? INSUFFICIENT_SIZE : OK; \
	*(room) = n_; \
	return result_; \
} while (0)

Return nvmlDeviceGetSupportedMemoryClocks(Device device, u32 *room, u32 *out)
{
	LIST(device, u32, out, room, "clocks.memory.");
}
Return nvmlDeviceGetSupportedGraphicsClocks(Device device, u32 memory, u32 *room, u32 *out)
{
	(void)memory;
	LIST(device, u32, out, room, "clocks.graphics.");
}

typedef struct { u32 pid; u64 memory; u32 gi, ci; } Process;
static Return processes(Device device, u32 *room, Process *out, const char *kind)
{
	u32 found = 0;
	long long pid;
	Return result;

	if (!device || !room)
		return INVALID_ARGUMENT;
	while ((result = number(device, &pid, "%s.%u.pid", kind, found)) == OK) {
		if (out && found < *room) {
			out[found] = (Process){ (u32)pid, 0, ~0u, ~0u };
			ASSIGN(u64, &out[found].memory, device, "%s.%u.memory", kind, found);
		}
		found++;
	}
	if (result != NOT_SUPPORTED)
		return result;
	result = found > *room ? INSUFFICIENT_SIZE : OK;
	*room = found;
	return result;
}
Return nvmlDeviceGetComputeRunningProcesses_v3(Device device, u32 *room, Process *out)
{
	return processes(device, room, out, "compute");
}
Return nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, u32 *room, Process *out)
{
	return processes(device, room, out, "graphics");
}
Return nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, u32 *room, Process *out)
{
	return processes(device, room, out, "mps");
}
Return nvmlDeviceGetProcessUtilization(Device device, void *out, u32 *room, u64 since)
{
	(void)device, (void)out, (void)room, (void)since;
	return NOT_FOUND; /* nothing was sampled */
}

/* How many pages were retired; their addresses are not told. */
Return nvmlDeviceGetRetiredPages_v2(Device device, u32 cause, u32 *room, u64 *addresses, u64 *times)
{
	long long pages;
	Return result;

	if (!device || !room)
		return INVALID_ARGUMENT;
	result = number(device, &pages, "retired.%u", cause);
	if (result != OK)
		return result;
	result = pages > *room || (pages && !addresses) ? INSUFFICIENT_SIZE : OK;
	for (u32 i = 0; result == OK && i < pages; i++) {
		addresses[i] = i;
		if (times)
			times[i] = 0;
	}
	*room = (u32)pages;
	return result;
}
Return nvmlDeviceGetRetiredPages(Device device, u32 cause, u32 *room, u64 *addresses)
{
	return nvmlDeviceGetRetiredPages_v2(device, cause, room, addresses, NULL);
}

/* Fields: their number, the key, the type (1 unsigned int, 3 unsigned long long, 4 signed long long, 5 int). */
static const struct { u32 id; const char *key; u32 type; } fields[] = {
	{ 1, "ecc.mode", 3 }, { 2, "ecc.mode_pending", 3 },
	{ 3, "ecc.0.0.total", 3 }, { 4, "ecc.1.0.total", 3 }, { 5, "ecc.0.1.total", 3 }, { 6, "ecc.1.1.total", 3 },
	{ 29, "retired.0", 1 }, { 30, "retired.1", 1 }, { 31, "retired.pending", 1 },
	{ 82, "temperature.memory", 1 }, { 83, "power.energy", 3 },
	{ 90, "nvlink.common_speed", 1 }, { 91, "nvlink.count", 1 },
	{ 94, "pcie.replays", 1 }, { 95, "pcie.rollovers", 1 },
	{ 142, "remap.corrected", 3 }, { 143, "remap.uncorrected", 3 }, { 144, "remap.pending", 3 },
	{ 145, "remap.failure", 3 },
	{ 161, "nvlink.%u.errors.0", 3 }, { 162, "nvlink.%u.errors.1", 3 }, { 163, "nvlink.%u.errors.2", 3 },
	{ 164, "nvlink.%u.speed", 1 }, { 165, "nvlink.%u.state", 1 }, { 166, "nvlink.%u.version", 1 },
	{ 185, "power.usage", 1 }, { 186, "power.usage", 1 }, { 187, "power.min", 1 }, { 188, "power.max", 1 },
	{ 189, "power.default", 1 }, { 190, "power.limit", 1 }, { 192, "power.limit", 1 },
	{ 193, "temperature.tlimit.shutdown", 5 }, { 194, "temperature.tlimit.slowdown", 5 },
	{ 195, "temperature.tlimit.memory", 5 }, { 196, "temperature.tlimit.gpu", 5 },
	{ 230, "recovery", 1 },
};
typedef struct {
	u32 id, scope;
	long long time, took;
	u32 type;
	Return result;
	union { u64 number; unsigned char bytes[8]; } value;
} Field;

Return nvmlDeviceGetFieldValues(Device device, int n, Field *out)
{
	struct timespec now;
	long long value;

	if (!device || !out || n < 0)
		return INVALID_ARGUMENT;
	clock_gettime(CLOCK_REALTIME, &now);
	for (int i = 0; i < n; i++) {
		out[i].time = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
		out[i].took = 0;
		out[i].result = NOT_SUPPORTED;
		for (size_t f = 0; f < sizeof fields / sizeof *fields; f++)
			if (fields[f].id == out[i].id) {
				out[i].type = fields[f].type;
				out[i].result = number(device, &value, fields[f].key, out[i].scope);
				if (out[i].result == OK)
					out[i].value.number = fields[f].type == 1 ? (u32)value : (u64)value;
			}
		if (out[i].result == UNINITIALIZED)
			return UNINITIALIZED;
	}
	return OK;
}

/* ---- between devices, and with the machine */

Return nvmlDeviceGetTopologyCommonAncestor(Device one, Device two, u32 *out)
{
	if (!one || !two)
		return INVALID_ARGUMENT;
	ASSIGN(u32, out, one, "topology.%d", two->gpu);
	return OK;
}
Return nvmlDeviceGetP2PStatus(Device one, Device two, u32 what, u32 *out)
{
	if (!one || !two)
		return INVALID_ARGUMENT;
	ASSIGN(u32, out, one, "p2p.%u.%d", what, two->gpu);
	return OK;
}
Return nvmlDeviceGetCpuAffinity(Device device, u32 words, unsigned long *out)
{
	long long cpus;
	Return result;

	if (!device || !out || !words)
		return INVALID_ARGUMENT;
	result = number(device, &cpus, "cpus"); /* how many, from 0 on */
	if (result == OK)
		for (u32 i = 0; i < words; i++, cpus -= 64)
			out[i] = cpus >= 64 ? ~0ul : cpus > 0 ? (1ul << cpus) - 1 : 0;
	return result;
}
Return nvmlDeviceGetCpuAffinityWithinScope(Device device, u32 words, unsigned long *out, u32 scope)
{
	(void)scope;
	return nvmlDeviceGetCpuAffinity(device, words, out);
}
Return nvmlDeviceGetMemoryAffinity(Device device, u32 words, unsigned long *out, u32 scope)
{
	long long node;
	Return result;

	(void)scope;
	if (!device || !out || !words)
		return INVALID_ARGUMENT;
	memset(out, 0, words * sizeof *out);
	result = number(device, &node, "numa");
	if (result == OK && node / 64 < words)
		out[node / 64] = 1ul << node % 64;
	return result;
}

/* ---- parts of a GPU (MIG): those that have a UUID are there */

Return nvmlDeviceIsMigDeviceHandle(Device device, u32 *out)
{
	if (!device || !out)
		return INVALID_ARGUMENT;
	*out = device->mig >= 0;
	return OK;
}
Return nvmlDeviceGetMigDeviceHandleByIndex(Device device, u32 index, Device *out)
{
	char value[WIDTH];
	Return result;

	if (!device || !out || index >= MIGS)
		return INVALID_ARGUMENT;
	result = text(device, value, sizeof value, "mig.%u.uuid", index);
	if (result == OK)
		*out = handle(device->gpu, (int)index);
	return result == NOT_SUPPORTED ? NOT_FOUND : result;
}
static Return instance(Device device, u32 *out, const char *key)
{
	if (!device || device->mig < 0)
		return INVALID_ARGUMENT;
	ASSIGN(u32, out, device, "%s", key);
	return OK;
}
Return nvmlDeviceGetGpuInstanceId(Device device, u32 *out) { return instance(device, out, "gi"); }
Return nvmlDeviceGetComputeInstanceId(Device device, u32 *out) { return instance(device, out, "ci"); }
Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device device, Device *out)
{
	if (!device || !out || device->mig < 0)
		return INVALID_ARGUMENT;
	*out = handle(device->gpu, -1);
	return OK;
}
typedef struct { u32 multiprocessors, copy, decoders, encoders, jpeg, ofa, gi_slices, ci_slices; u64 memory; } Attributes;
Return nvmlDeviceGetAttributes_v2(Device device, Attributes *out)
{
	static const struct place places[] = {
		PLACE(Attributes, multiprocessors, "multiprocessors"), PLACE(Attributes, copy, "copy"),
		PLACE(Attributes, gi_slices, "gi_slices"), PLACE(Attributes, ci_slices, "ci_slices"),
		PLACE(Attributes, memory, "memory"),
	};
	if (out)
		memset(out, 0, sizeof *out);
	return FILL(device, out, places, "attributes.");
}

/* ---- changes: a simulated GPU takes none */

#define REFUSED(call, ...) Return call(Device device, ##__VA_ARGS__) { (void)device; return NO_PERMISSION; }
REFUSED(nvmlDeviceSetApplicationsClocks, u32 memory __attribute__((unused)), u32 graphics __attribute__((unused)))
REFUSED(nvmlDeviceResetApplicationsClocks)
